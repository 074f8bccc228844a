#include "hvd/engine/health/health.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kLookInterval = 100ms;  // how often the living are counted
constexpr auto kConflictTime = 1s;
// of a host; its leader sends something every second
constexpr std::chrono::seconds kSilence = 10s;
constexpr auto kGraceForCulprits = 2s;  // whoever can name them has the first word
constexpr auto kLateInterval = 20ms;    // how often it is looked whether the leaders have
constexpr int kLooks = 10;              // at a rank, before it is taken to live
// of time that counts: a process that was stopped itself has not waited meanwhile
constexpr auto kMostAtOnce = 1s;

/// " (fc.weight and 3 more)", of a group whose members have names.
std::string describe_members(const Submission& submission) {
  const auto& members = submission.tensors;
  if (members.empty() || members.front().name.empty()) return "";
  return members.size() == 1
             ? formatted(" ({})", members.front().name)
             : formatted(" ({} and {} more)", members.front().name, members.size() - 1);
}

}  // namespace

void Health::look(const Turn& /*turn*/) noexcept {
  const auto now = Clock::now();
  if (now - last_look_ < kLookInterval && now < next_deadline()) return;
  const auto since_last_look = now - std::exchange(last_look_, now);
  Board& board = *parts_.board;
  try {
    if (board.failed()) return next_deadline_.store(Entry::kNever.time_since_epoch().count());
    if (board.end_if_one_died() || end_if_leader_is_silent(since_last_look)) return;
    const EngineLock lock(mutex_);
    look_for_conflicts();
    deadlocks_.look();
    look_for_late();
    report_stalls();
    report_late_messages();
    if (leader_ != nullptr) report_silence();
  } catch (...) {
    board.set_failure(status_of_current_exception());
  }
}

/// Ends the world if the leader, a rank of this host, is silent for as long as hosts may be: the
/// others take this host for lost then. Returns whether it is.
bool Health::end_if_leader_is_silent(Clock::duration since_last_look) {
  const Config& config = parts_.config;
  if (!parts_.alarm || config.host_timeout == 0s) return false;
  const auto beats = parts_.board->beats(0);
  const bool is_silent = std::exchange(leader_beats_, beats) == beats && beats != 0;
  leader_silence_ = is_silent
                        ? leader_silence_ + std::min<Clock::duration>(since_last_look, kMostAtOnce)
                        : Clock::duration(0);
  if (leader_silence_ < std::max(config.host_timeout, Heartbeat::kMissed)) return false;
  parts_.board->set_failure(
      {Status::Code::RankFailed,
       formatted("nothing has come from rank {}, which speaks for its host, for {} s: {} "
                 "(HVD_HOST_TIMEOUT_SECONDS={})",
                 parts_.topology.domain_ranks.front(),
                 std::chrono::duration_cast<std::chrono::seconds>(leader_silence_).count(),
                 kIsStopped, config.host_timeout.count())});
  return true;
}

void Health::look_for_conflicts() {
  // Different operations under one name are separate submissions, which may legally come in any
  // order. They are taken for a disagreement only when all ranks of the set have waited under the
  // name for a while, or asked again and again, and no operation has them all. Every rank of the
  // set waits then, so each looks at the names that it waits under itself.
  const auto now = Clock::now();
  std::set<std::pair<int, std::string>> names;
  ledger_.for_each([&](const Entry& entry) {
    const bool was_polled = entry.pending->polled.exchange(false, std::memory_order_relaxed);
    if (entry.state != EntryState::Waiting || !entry.announced || now - entry.since < kConflictTime)
      return;
    // Who polls is not blocked: nobody is to take it for that, unless the name has a conflict.
    const bool is_awaited = entry.pending->waited_for.load(std::memory_order_relaxed);
    if (!is_awaited && !was_polled) return;
    const bool is_ambiguous = table().is_ambiguous(entry.key.process_set, entry.key.name);
    if (!is_awaited && !is_ambiguous) return;
    parts_.board->rounds().set_stuck(entry.unit.id);
    if (is_ambiguous) names.insert({entry.key.process_set, entry.key.name});
  });
  for (const auto& [set, name] : names)
    if (table().sets().scope_of(set) == Scope::Domain) controller_.end_conflict_here(set, name);
  // The leader speaks for ranks of its domain, which may be in sets that it is not in.
  const auto marks = parts_.board->rounds().stuck_marks();
  if (leader_ == nullptr || std::exchange(seen_stuck_marks_, marks) == marks) return;
  // This domain may have forgotten what others want under the name, but not their leaders' tree.
  const auto ambiguous = leader_->ambiguous_names();  // a copy: what follows may change them
  for (const auto& [set, name] : ambiguous) {
    if (!table().sets().has(set)) continue;
    if (const auto stuck_ranks = controller_.stuck_here(set, name); !stuck_ranks.empty())
      leader_->tell_stuck(set, name, stuck_ranks);
  }
}

std::string Health::describe_others(const Entry& entry) const {
  std::string text;
  const auto& domain = parts_.topology.domain_ranks;
  for (const Unit* other : table().units_of(entry.key.process_set, entry.key.name)) {
    std::vector<int> there;
    for (std::size_t i = 0; other->id != entry.unit.id && i < domain.size(); ++i)
      if (parts_.board->rounds().has_arrived(other->id, static_cast<int>(i)))
        there.push_back(domain[i]);
    if (!there.empty())
      text += formatted("{}rank{} {} wait{} for {} of that name", text.empty() ? "" : "; ",
                        there.size() == 1 ? "" : "s", rank_list(there),
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
        (entry.key.kind == OpKind::Join ||
         !std::binary_search(joined.begin(), joined.end(), domain[i])))
      missing.push_back(domain[i]);
  std::string text;
  if (!missing.empty()) {
    text = formatted("rank{} {} {} not submitted it", missing.size() == 1 ? "" : "s",
                     rank_list(missing), missing.size() == 1 ? "has" : "have");
  } else if (const int claimant = parts_.board->rounds().claimant(entry.unit.id);
             claimant != Board::kNobody) {
    text = formatted("rank {} came last and does not end it: {}",
                     domain[static_cast<std::size_t>(claimant)], kIsStopped);
  } else if (const auto awaited = leader_ != nullptr ? leader_->awaited(entry.key) : missing;
             awaited.size() == 1) {
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
  ledger_.for_each([&](Entry& entry)
                       HVD_REQUIRES(engine_mutex) { report_stall(entry, now, false); });
  queue_.for_each([&](Entry& entry) HVD_REQUIRES(engine_mutex) { report_stall(entry, now, true); });
}

void Health::report_late_messages() {
  const Config& config = parts_.config;
  const auto now = Clock::now();
  messages_.for_each_awaited(
      [&](const std::string& what, Clock::time_point since, Clock::time_point& reported) {
        const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - since);
        const std::string text = formatted("{} has waited {} s", what, waited.count());
        if (config.stall_shutdown_time > 0s && waited >= config.stall_shutdown_time)
          return parts_.board->set_failure({Status::Code::StallTimeout, text});
        if (config.stall_check_disable || now - std::max(since, reported) < config.stall_check_time)
          return;
        reported = now;
        log(LogLevel::Warning, "{}", text);
      });
}

std::string Health::describe_silence(const Heartbeat::Silence& silence) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < parts_.topology.size; ++rank)
    if (parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)] == silence.domain)
      ranks.push_back(rank);
  return formatted(
      "nothing has come from rank{} {} for {} s: their host may be frozen, without power or cut "
      "off",
      ranks.size() == 1 ? "" : "s", rank_list(ranks), silence.lasted.count());
}

void Health::report_silence() {
  const Config& config = parts_.config;
  const auto limit =
      std::clamp<std::chrono::seconds>(config.stall_check_time, Heartbeat::kMissed, kSilence);
  const auto now = Clock::now();
  for (const auto& silence : leader_->silences(Heartbeat::kMissed)) {
    const std::string text = describe_silence(silence);
    if (config.host_timeout > 0s && silence.lasted >= config.host_timeout)
      return parts_.board->set_failure(
          {Status::Code::RankFailed,
           formatted("{} (HVD_HOST_TIMEOUT_SECONDS={})", text, config.host_timeout.count())});
    if (config.stall_check_disable || silence.lasted < limit) continue;
    if (config.stall_shutdown_time > 0s && silence.lasted >= config.stall_shutdown_time)
      return parts_.board->set_failure({Status::Code::StallTimeout, text});
    auto& reported = silence_reported_[silence.domain];
    if (now - reported < config.stall_check_time) continue;
    reported = now;
    log(LogLevel::Warning, "{}", text);
  }
}

Health::Culprits Health::find_culprits(const Entry& entry, bool waits_for_name) const {
  Culprits found;
  const bool is_here = log_.table().sets().scope_of(entry.key.process_set) == Scope::Domain;
  if (waits_for_name) {
    found.text = "an earlier submission under its name is still in flight";
  } else if (entry.state != EntryState::Waiting) {
    found.text =
        "all ranks have submitted it, but its batch does not end: a rank or a connection may be "
        "frozen or very slow";
    found.known = leader_ != nullptr || is_here;  // leaders may know of a silent host
  } else if (!entry.announced) {
    found.text = "there is no room for its name in the ranks' tables: a rank may be frozen";
  } else {
    found.text = describe_missing(entry);
    found.known = !found.text.empty() || is_here;
    if (found.text.empty())
      found.text =
          is_here
              ? "all its ranks have submitted it, but none says so: the last of them may be frozen"
              : "ranks on other hosts have not submitted it";
  }
  if (leader_ != nullptr && !parts_.config.stall_check_disable)
    for (const auto& silence : leader_->silences(Heartbeat::kMissed))
      found.text += "; " + describe_silence(silence);
  return found;
}

// --------------------------------------------------------------------------------------- deadlines

/// Returns whether no other deadline is before.
bool Health::is_next(Clock::time_point deadline) {
  const Clock::rep time = deadline.time_since_epoch().count();
  Clock::rep next = next_deadline_.load();
  while (time < next)
    if (next_deadline_.compare_exchange_weak(next, time)) return true;
  return false;
}

void Health::expect(Clock::time_point deadline) {
  if (!is_next(deadline)) return;
  auto& bells = parts_.board->bells();
  bells.ring_waiters();
  bells.ring_worker(parts_.board->self());
}

void Health::look_for_late() {
  tell_of_late();
  if (next_deadline() == Entry::kNever) return;
  // before the look: what is expected meanwhile is admitted before
  next_deadline_.store(Entry::kNever.time_since_epoch().count());
  const auto now = Clock::now();
  auto next = Entry::kNever;
  const auto look = [&](Entry& entry, bool waits_for_name) HVD_REQUIRES(engine_mutex) {
    if (entry.deadline != Entry::kNever)
      next = std::min(next, end_if_late(entry, now, waits_for_name));
  };
  ledger_.for_each([&](Entry& entry) HVD_REQUIRES(engine_mutex) { look(entry, false); });
  queue_.for_each([&](Entry& entry) HVD_REQUIRES(engine_mutex) { look(entry, true); });
  static_cast<void>(is_next(next));
}

/// Ends the world if the entry is late. Returns when to look again.
Clock::time_point Health::end_if_late(Entry& entry, Clock::time_point now, bool waits_for_name) {
  if (now < entry.deadline) return entry.deadline;
  if (parts_.board->failed()) return Entry::kNever;
  const bool may_be_known_elsewhere =
      entry.state == EntryState::Waiting && entry.announced && !waits_for_name &&
      log_.table().sets().scope_of(entry.key.process_set) == Scope::World;
  const auto time = entry.submission.deadline;
  if (may_be_known_elsewhere && now < entry.deadline + kGraceForCulprits) {
    parts_.board->rounds().set_late(entry.unit, time);
    parts_.board->bells().ring_worker(0);  // the leader's
    return now + kLateInterval;
  }
  const std::string what =
      late_text(entry.key, parts_.topology.rank, time, describe_members(entry.submission));
  parts_.board->set_failure(
      {Status::Code::StallTimeout, what + find_culprits(entry, waits_for_name).text});
  return Entry::kNever;
}

/// The leader speaks for ranks of its domain whose operations, of several domains, are late.
void Health::tell_of_late() {
  if (leader_ == nullptr) return;
  for (int index = 0; index < parts_.board->ranks(); ++index) {
    const auto late = parts_.board->rounds().late(index);
    if (!late || !table().knows(late->unit.id)) continue;
    const Unit& unit = table().unit(late->unit.id);
    if (unit.generation != late->unit.generation || unit.queued ||
        !parts_.board->rounds().is_open(unit.id, index, unit.undecided))
      continue;
    leader_->tell_late({unit.key,
                        parts_.topology.domain_ranks[static_cast<std::size_t>(index)],
                        late->deadline,
                        {},
                        {}});
  }
}

// ------------------------------------------------------------------------------------------ stalls

void Health::report_stall(Entry& entry, Clock::time_point now, bool waits_for_name) {
  const Config& config = parts_.config;
  if (parts_.board->failed()) return;
  const auto since = entry.state == EntryState::Waiting ? entry.since : entry.agreed_at;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - since);
  const bool due = !config.stall_check_disable &&
                   now - std::max(since, entry.reported) >= config.stall_check_time;
  bool over = config.stall_shutdown_time > 0s && waited >= config.stall_shutdown_time;
  if (!over && !due) return;
  const auto [culprits, known] = find_culprits(entry, waits_for_name);
  over = over && (known || waited >= config.stall_shutdown_time + kGraceForCulprits);
  if (!over && !due) return;
  entry.reported = now;
  const std::string text = formatted("{} '{}'{} has waited {} s: {}", name_of(entry.key.kind),
                                     display_name(entry.key.name),
                                     describe_members(entry.submission), waited.count(), culprits);
  if (over) {
    parts_.board->set_failure({Status::Code::StallTimeout, text});
  } else {
    log(LogLevel::Warning, "{}", text);
  }
}

void FailureMessenger::tell(const Turn& turn, const Status& status) noexcept {
  if (leader_) {
    const EngineLock lock(mutex_);
    leader_->tell_failure(turn, status);
    return;
  }
  if (!parts_.alarm) return;
  // The leader speaks for its domain; where it is dead, the first of those that live.
  for (int rank = 0; rank < parts_.board->self(); ++rank) {
    bool dead = parts_.board->is_dead(rank);
    // one that another rank looks at just now seems to live
    for (int look = 0; look < kLooks && !dead; ++look) {
      std::this_thread::sleep_for(100us);
      dead = parts_.board->is_dead(rank);
    }
    if (!dead) return;
  }
  try {
    const SharedBytes message = share(LeaderTree::failure_message(status));
    for (int domain = 0; domain < parts_.topology.domains; ++domain)
      if (domain != parts_.topology.domain) parts_.alarm->send(domain, message);
  } catch (...) {
    log(LogLevel::Warning, "the other hosts could not be told of the failure: {}",
        status_of_current_exception().text());
  }
}

void FailureMessenger::drain(const Turn& turn) noexcept {
  if (leader_) {
    const EngineLock lock(mutex_);
    leader_->drain(turn);
  } else if (parts_.alarm) {
    try {
      // lets the wire send; nobody writes to a rank that leads nothing
      while (parts_.alarm->receive()) continue;
    } catch (...) {
      log(LogLevel::Debug, "after the failure: {}", status_of_current_exception().text());
    }
  }
}

}  // namespace hvd
