#include "hvd/engine/health/health.h"

#include <algorithm>
#include <set>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kLookInterval = 100ms;  // how often the living are counted
constexpr auto kConflictTime = 1s;
constexpr std::chrono::seconds kSilence = 10s;  // of a host; its leader sends something every second
constexpr auto kGraceForCulprits = 2s;          // whoever can name them has the first word

/// " (fc.weight and 3 more)", of a group whose members have names.
std::string describe_members(const Submission& submission) {
  const auto& members = submission.tensors;
  if (members.empty() || members.front().name.empty()) return "";
  return members.size() == 1 ? formatted(" ({})", members.front().name)
                             : formatted(" ({} and {} more)", members.front().name, members.size() - 1);
}

}  // namespace

void Health::look(const Turn& /*turn*/) noexcept {
  const auto now = Clock::now();
  if (now - last_look_ < kLookInterval) return;
  last_look_ = now;
  Board& board = *parts_.board;
  try {
    if (board.failed()) return;
    if (const auto dead = board.find_dead()) {
      const int rank = parts_.topology.domain_ranks[static_cast<std::size_t>(*dead)];
      board.set_failure({Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()", rank)});
      return;
    }
    const EngineLock lock(mutex_);
    look_for_conflicts();
    deadlocks_.look();
    report_stalls();
    if (leader_ != nullptr) report_silence();
  } catch (...) {
    board.set_failure(status_of_current_exception());
  }
}

void Health::look_for_conflicts() {
  // Different operations under one name are separate submissions, which may legally come in any order. They are taken for a
  // disagreement only when all ranks of the set have waited under the name for a while, and no operation has them all. Every rank of the
  // set waits then, so each looks at the names that it waits under itself.
  const auto now = Clock::now();
  std::set<std::pair<int, std::string>> names;
  ledger_.for_each([&](const Entry& entry) {
    if (entry.state != EntryState::Waiting || !entry.announced || now - entry.since < kConflictTime) return;
    if (!entry.pending->waited_for.load(std::memory_order_relaxed)) return;
    parts_.board->rounds().set_stuck(entry.unit.id);
    if (table().is_ambiguous(entry.key.process_set, entry.key.name)) names.insert({entry.key.process_set, entry.key.name});
  });
  for (const auto& [set, name] : names)
    if (table().sets().scope_of(set) == Scope::Domain) controller_.end_conflict_here(set, name);
  // The leader speaks for ranks of its domain, which may be in sets that it is not in.
  const auto marks = parts_.board->rounds().stuck_marks();
  if (leader_ == nullptr || std::exchange(seen_stuck_marks_, marks) == marks) return;
  const auto ambiguous = table().ambiguous_names();  // a copy: what is ended below is forgotten
  for (const auto& [set, name] : ambiguous) {
    if (table().sets().scope_of(set) != Scope::World) continue;
    if (const auto stuck_ranks = controller_.stuck_here(set, name); !stuck_ranks.empty()) leader_->tell_stuck(set, name, stuck_ranks);
  }
}

std::string Health::describe_others(const Entry& entry) const {
  std::string text;
  const auto& domain = parts_.topology.domain_ranks;
  for (const Unit* other : table().units_of(entry.key.process_set, entry.key.name)) {
    std::vector<int> there;
    for (std::size_t i = 0; other->id != entry.unit.id && i < domain.size(); ++i)
      if (parts_.board->rounds().has_arrived(other->id, static_cast<int>(i))) there.push_back(domain[i]);
    if (!there.empty())
      text += formatted("{}rank{} {} wait{} for {} of that name", text.empty() ? "" : "; ", there.size() == 1 ? "" : "s", rank_list(there),
                        there.size() == 1 ? "s" : "", name_of(other->key.kind));
  }
  return text;
}

std::string Health::describe_missing(const Entry& entry) const {
  const auto& set = table().sets().info(entry.key.process_set);
  const auto& domain = parts_.topology.domain_ranks;
  const auto& joined = table().sets().joined(entry.key.process_set);
  std::vector<int> missing;
  for (std::size_t i = 0; i < domain.size(); ++i)
    if (std::binary_search(set.ranks.begin(), set.ranks.end(), domain[i]) &&
        !parts_.board->rounds().has_arrived_too(entry.unit.id, static_cast<int>(i)) &&
        (entry.key.kind == OpKind::Join || !std::binary_search(joined.begin(), joined.end(), domain[i])))
      missing.push_back(domain[i]);
  std::string text;
  if (!missing.empty()) {
    text = formatted("rank{} {} {} not submitted it", missing.size() == 1 ? "" : "s", rank_list(missing),
                     missing.size() == 1 ? "has" : "have");
  } else if (const int claimant = parts_.board->rounds().claimant(entry.unit.id); claimant != Board::kNobody) {
    text = formatted("rank {} came last and does not end it: {}", domain[static_cast<std::size_t>(claimant)], kIsStopped);
  } else if (const auto awaited = leader_ != nullptr ? leader_->awaited(entry.key) : missing; awaited.size() == 1) {
    text = formatted("rank {}, on another host, has not submitted it", awaited.front());
  } else if (!awaited.empty()) {
    text = formatted("some of ranks {}, on other hosts, have not submitted it", rank_list(awaited));
  }
  const std::string others = describe_others(entry);
  if (text.empty() || others.empty()) return text + others;
  return text + "; " + others;
}

void Health::report_stalls() {
  const auto now = Clock::now();
  ledger_.for_each([&](Entry& entry) HVD_REQUIRES(engine_mutex) { report_stall(entry, now, false); });
  queue_.for_each([&](Entry& entry) HVD_REQUIRES(engine_mutex) { report_stall(entry, now, true); });
}

std::string Health::describe_silence(const Heartbeat::Silence& silence) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < parts_.topology.size; ++rank)
    if (parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)] == silence.domain) ranks.push_back(rank);
  return formatted("nothing has come from rank{} {} for {} s: their host may be frozen, without power or cut off",
                   ranks.size() == 1 ? "" : "s", rank_list(ranks), silence.lasted.count());
}

void Health::report_silence() {
  const Config& config = parts_.config;
  const auto limit = std::clamp<std::chrono::seconds>(config.stall_check_time, Heartbeat::kMissed, kSilence);
  const auto now = Clock::now();
  for (const auto& silence : leader_->silences(Heartbeat::kMissed)) {
    const std::string text = describe_silence(silence);
    if (config.host_timeout > 0s && silence.lasted >= config.host_timeout)
      return parts_.board->set_failure(
          {Status::Code::RankFailed, formatted("{} (HVD_HOST_TIMEOUT_SECONDS={})", text, config.host_timeout.count())});
    if (config.stall_check_disable || silence.lasted < limit) continue;
    if (config.stall_shutdown_time > 0s && silence.lasted >= config.stall_shutdown_time)
      return parts_.board->set_failure({Status::Code::StallTimeout, text});
    auto& reported = silence_reported_[silence.domain];
    if (now - reported < config.stall_check_time) continue;
    reported = now;
    log(LogLevel::Warning, "{}", text);
  }
}

void Health::report_stall(Entry& entry, Clock::time_point now, bool waits_for_name) {
  const Config& config = parts_.config;
  if (parts_.board->failed()) return;
  const auto since = entry.state == EntryState::Waiting ? entry.since : entry.agreed_at;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - since);
  const bool due = !config.stall_check_disable && now - std::max(since, entry.reported) >= config.stall_check_time;
  bool over = config.stall_shutdown_time > 0s && waited >= config.stall_shutdown_time;
  if (!over && !due) return;
  std::string culprits;
  bool known = true;
  if (waits_for_name) {
    culprits = "an earlier submission under its name is still in flight";
  } else if (entry.state != EntryState::Waiting) {
    culprits = "all ranks have submitted it, but its batch does not end: a rank or a connection may be frozen or very slow";
    known =
        leader_ != nullptr || log_.table().sets().scope_of(entry.key.process_set) == Scope::Domain;  // leaders may know of a silent host
  } else if (!entry.announced) {
    culprits = "there is no room for its name in the ranks' tables: a rank may be frozen";
  } else {
    culprits = describe_missing(entry);
    known = !culprits.empty() || log_.table().sets().scope_of(entry.key.process_set) == Scope::Domain;
    if (culprits.empty())
      culprits = known ? "all its ranks have submitted it, but none says so: the last of them may be frozen"
                       : "ranks on other hosts have not submitted it";
  }
  if (leader_ != nullptr && !config.stall_check_disable)
    for (const auto& silence : leader_->silences(Heartbeat::kMissed)) culprits += "; " + describe_silence(silence);
  over = over && (known || waited >= config.stall_shutdown_time + kGraceForCulprits);
  if (!over && !due) return;
  entry.reported = now;
  const std::string text = formatted("{} '{}'{} has waited {} s: {}", name_of(entry.key.kind), display_name(entry.key.name),
                                     describe_members(entry.submission), waited.count(), culprits);
  if (over) {
    parts_.board->set_failure({Status::Code::StallTimeout, text});
  } else {
    log(LogLevel::Warning, "{}", text);
  }
}

}  // namespace hvd
