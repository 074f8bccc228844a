// How an entry, a world and an engine end.
#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

constexpr auto kLookInterval = 100ms;  // how often the living are counted
constexpr auto kConflictTime = 1s;

}  // namespace

void Engine::finish_entry(Entry& entry, Status status) {
  if (entry.op != nullptr) {
    std::erase(in_fast_path_, &entry);
    if (!status.ok() && entry.announced && board_.has_result(entry.unit)) return take_result(entry);  // it was done before that
  }
  entry.state = advance(entry.state, status.ok() ? EntryEvent::Finish : EntryEvent::Fail);
  release(entry);  // what never travelled: all of it after a failure, otherwise the tensors that nobody had
  if (entry.trace != 0) timeline().finished(entry.trace, status);
  const auto pending = entry.pending;
  std::unique_ptr<Entry> owned;
  if (entry.op != nullptr && status.ok()) {
    entry.op->place = ledger_.take_out(entry);
  } else {
    owned = ledger_.remove(entry);
    if (status.ok() && entry.repeats) make_persistent(entry);
    if (!status.ok()) drop_persistent(entry.key);
  }
  pending->status = std::move(status);
  pending->done.store(true, std::memory_order_release);
  if (waiters_ > 0) changed_.notify_all();
  if (!later_.empty()) {  // whoever drives next has something to announce
    board_.ring_waiters();
    board_.ring_worker(board_.self());
  }
}

void Engine::fail_what_was_never_agreed() {
  for (Entry* entry : ledger_.all()) {
    if (entry->state != EntryState::Waiting || !entry->announced) continue;
    finish_entry(*entry, {Status::Code::Shutdown, formatted("{} '{}' was pending when hvd::shutdown() was called", name_of(entry->key.kind),
                                                            display_name(entry->key.name))});
  }
}

void Engine::fail_later(const Status& status) {
  for (auto& [key, waiting] : later_) {
    for (auto& entry : waiting) {
      release(*entry);
      entry->pending->status = status;
      entry->pending->done.store(true, std::memory_order_release);
    }
  }
  later_.clear();
}

void Engine::fail_world(const Status& status) noexcept {
  board_.set_failure(status);
  fail_everything(board_.failure());
}

void Engine::fail_everything(const Status& status) noexcept {
  if (std::exchange(failure_handled_, true)) return;
  for (const auto& backend : parts_.backends) backend->abort();
  running_.clear();
  const std::lock_guard lock(mutex_);
  over_ = status;
  to_launch_.clear();
  for (Entry* entry : ledger_.all())
    if (entry->announced) finish_entry(*entry, status);  // the others' submitters find `over_` set
  fail_later(status);
  if (leader_tree_) {
    try {
      leader_tree_->failed(status);
      leader_tree_->advance();
    } catch (...) {
      log(LogLevel::Warning, "the other hosts could not be told of the failure: {}", status_of_current_exception().text());
    }
  }
  changed_.notify_all();
}

void Engine::look_for_trouble() {
  const auto now = Clock::now();
  if (now - last_look_ < kLookInterval) return;
  last_look_ = now;
  if (board_.failed()) return;
  if (const auto dead = board_.find_dead()) {
    const int rank = parts_.topology.domain_ranks[static_cast<std::size_t>(*dead)];
    board_.set_failure({Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()", rank)});
    return;
  }
  try {
    look_for_conflicts();
    report_stalls();
  } catch (...) {
    board_.set_failure(status_of_current_exception());
  }
}

std::vector<StuckRank> Engine::stuck_here(int process_set, const std::string& name) const {
  std::vector<StuckRank> stuck_ranks;
  const auto units = negotiator_.units_of(process_set, name);
  const auto& ranks = negotiator_.process_set(process_set).ranks;
  const auto& domain = parts_.topology.domain_ranks;
  for (std::size_t index = 0; index < domain.size(); ++index) {
    if (!std::binary_search(ranks.begin(), ranks.end(), domain[index])) continue;
    const auto is_stuck = [&](const Unit* unit) {
      return board_.is_stuck(unit->id, static_cast<int>(index), unit->scope == Scope::World && unit->undecided);
    };
    const auto stuck = std::find_if(units.begin(), units.end(), is_stuck);
    if (stuck == units.end()) return {};
    stuck_ranks.push_back({domain[index], (*stuck)->key.kind});
  }
  return stuck_ranks;
}

void Engine::look_for_conflicts() {
  // Different operations under one name are separate submissions, which may legally come in any order. They are taken for a
  // disagreement only when all ranks of the set have waited under the name for a while, and no operation has them all.
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  ledger_.for_each([&](const Entry& entry) {
    if (entry.state != EntryState::Waiting || !entry.announced || now - entry.since < kConflictTime) return;
    if (entry.pending->waited_for.load(std::memory_order_relaxed)) board_.set_stuck(entry.unit);
  });
  for (const auto& [set, name] : negotiator_.ambiguous_names()) {
    if (negotiator_.scope_of(set) == Scope::World) {
      if (!leader_tree_) continue;
      if (const auto stuck_ranks = stuck_here(set, name); !stuck_ranks.empty()) leader_tree_->stuck(set, name, stuck_ranks);
    } else if (negotiator_.process_set(set).rank >= 0) {
      with_log(256 + name.size() + 16 * static_cast<std::size_t>(board_.ranks()), [&] {
        const auto stuck_ranks = stuck_here(set, name);
        const auto differs = [&](const StuckRank& stuck_rank) { return stuck_rank.kind != stuck_ranks.front().kind; };
        if (std::any_of(stuck_ranks.begin(), stuck_ranks.end(), differs)) commit_conflict(set, name, stuck_ranks);
      });
    }
  }
}

void Engine::commit_conflict(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks) {
  for (const Unit* unit : negotiator_.units_of(process_set, name)) {
    const auto of_it = [&](const StuckRank& stuck_rank) { return stuck_rank.kind == unit->key.kind; };
    if (std::any_of(stuck_ranks.begin(), stuck_ranks.end(), of_it)) board_.void_slot(unit->id, unit->slots);
  }
  commit(Negotiator::conflict(process_set, name, stuck_ranks));
}

std::string Engine::describe_missing(const Entry& entry) const {
  const auto& set = negotiator_.process_set(entry.key.process_set);
  const auto& domain = parts_.topology.domain_ranks;
  const auto& joined = negotiator_.joined(entry.key.process_set);
  std::vector<int> missing;
  for (std::size_t i = 0; i < domain.size(); ++i)
    if (std::binary_search(set.ranks.begin(), set.ranks.end(), domain[i]) && !board_.has_arrived_too(entry.unit, static_cast<int>(i)) &&
        (entry.key.kind == OpKind::Join || !std::binary_search(joined.begin(), joined.end(), domain[i])))
      missing.push_back(domain[i]);
  std::string text;
  if (!missing.empty()) {
    text = formatted("rank{} {} {} not submitted it", missing.size() == 1 ? "" : "s", rank_list(missing),
                     missing.size() == 1 ? "has" : "have");
  } else if (const auto awaited = leader_tree_ ? leader_tree_->awaited(entry.key) : missing; awaited.size() == 1) {
    text = formatted("rank {}, on another host, has not submitted it", awaited.front());
  } else if (!awaited.empty()) {
    text = formatted("some of ranks {}, on other hosts, have not submitted it", rank_list(awaited));
  }
  for (const Unit* other : negotiator_.units_of(entry.key.process_set, entry.key.name)) {
    std::vector<int> there;
    for (std::size_t i = 0; other->id != entry.unit && i < domain.size(); ++i)
      if (board_.has_arrived(other->id, static_cast<int>(i))) there.push_back(domain[i]);
    if (!there.empty())
      text += formatted("{}rank{} {} wait{} for {} of that name", text.empty() ? "" : "; ", there.size() == 1 ? "" : "s", rank_list(there),
                        there.size() == 1 ? "s" : "", name_of(other->key.kind));
  }
  return text;
}

void Engine::report_stalls() {
  const Config& config = parts_.config;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  ledger_.for_each([&](Entry& entry) {
    if (entry.state != EntryState::Waiting || !entry.announced || board_.failed()) return;
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - entry.since);
    const bool due = !config.stall_check_disable && now - entry.reported >= config.stall_check_time;
    bool over = config.stall_shutdown_time > 0s && waited >= config.stall_shutdown_time;
    if (!over && !due) return;
    const std::string culprits = describe_missing(entry);
    // Whoever can name them has the first word.
    over = over && (!culprits.empty() || waited >= config.stall_shutdown_time + kGraceForDecisions);
    if (!over && !due) return;
    entry.reported = now;
    const std::string text = formatted("{} '{}' has waited {} s: {}", name_of(entry.key.kind), display_name(entry.key.name), waited.count(),
                                       culprits.empty() ? "ranks on other hosts have not submitted it" : culprits);
    if (over) {
      board_.set_failure({Status::Code::StallTimeout, text});
      return;
    }
    log(LogLevel::Warning, "{}", text);
  });
}

bool Engine::shutdown(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopping_, true)) return stopped_cleanly_.load();
    if (!board_.failed()) {
      try {
        with_log(64 + sizeof(Pledge) * (ledger_.size() + later_.size()),
                 [this] { commit(Negotiator::leaving(parts_.topology.rank, pledges())); });
      } catch (...) {
        board_.set_failure(status_of_current_exception());
      }
    }
  }
  board_.ring_waiters();
  board_.ring_all_workers();
  const auto is_over = [this, deadline] {
    if (failure_handled_ || Clock::now() > deadline) return true;
    const std::lock_guard lock(mutex_);
    return negotiator_.all_left() && ledger_.empty() && later_.empty() && local_events_.empty();
  };
  while (!try_take_turn()) std::this_thread::sleep_for(50us);
  for (unsigned idle = 0; !is_over();) {
    const std::uint32_t bell = board_.wait_doorbell().load(std::memory_order_seq_cst);
    if (progress()) {
      idle = 0;
    } else if (!is_over()) {
      idle_wait(bell, idle++);
      look_for_trouble();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_cleanly_.store(!board_.failed() && negotiator_.all_left());
    if (board_.failed()) log(LogLevel::Warning, "shut down after a failure: {}", board_.failure().text());
    if (over_.ok()) over_ = {Status::Code::Shutdown, "hvd::shutdown() has been called"};
    for (Entry* entry : ledger_.all())
      if (entry->announced) finish_entry(*entry, over_);
    fail_later(over_);
  }
  stop_thread_.store(true);
  board_.ring_worker(board_.self());
  timeline().stop();
  // The wheel stays taken: nothing is driven any more.
  return stopped_cleanly_.load();
}

}  // namespace hvd
