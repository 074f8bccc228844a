#include "hvd/engine/leader/leader_task.h"

#include <set>
#include <utility>

#include "hvd/base/log.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kTrafficMemory = 1s;  // as long after a message the next may come at any time

}  // namespace

LeaderTask::LeaderTask(const EngineParts& parts, NegotiationLog& log, Controller& controller,
                       Cutter& cutter, Leavers& leavers, FastPath& fast_path)
    : parts_(parts),
      log_(log),
      controller_(controller),
      cutter_(cutter),
      leavers_(leavers),
      heartbeat_(*parts.transport,
                 LeaderTree::neighbours_of(parts.topology.domain, parts.topology.domains)),
      direct_(parts, log, fast_path, heartbeat_),
      tree_(direct_.lane(), actions(), parts.board->slots()) {}

// The tree calls these from within `drive` and `tell_failure`, under the engine's mutex, which the
// analysis cannot see through the std::functions.
LeaderTreeActions LeaderTask::actions() HVD_NO_THREAD_SAFETY_ANALYSIS {
  LeaderTreeActions actions;
  actions.introduce =
      [this](const UnitKey& key, const Runs& ranks, const Signature& signature)
          HVD_NO_THREAD_SAFETY_ANALYSIS { controller_.introduce_remote(key, ranks, signature); };
  actions.agree = [this](const UnitKey& key, const Agreement& what) HVD_NO_THREAD_SAFETY_ANALYSIS {
    controller_.agree_by_root(key, what,
                              [this, &key]() HVD_NO_THREAD_SAFETY_ANALYSIS { tree_.retell(key); });
  };
  actions.cut = [this](int set) HVD_NO_THREAD_SAFETY_ANALYSIS { return cutter_.cut_world(set); };
  actions.credit = [this](int set, int domain, std::uint64_t over) HVD_NO_THREAD_SAFETY_ANALYSIS {
    cutter_.take_credit({set, domain, over});
  };
  actions.leave = [this](int rank)
                      HVD_NO_THREAD_SAFETY_ANALYSIS { leavers_.leave_elsewhere(rank); };
  actions.refuse = [this](const UnitKey& key, int rank, const std::string& text)
                       HVD_NO_THREAD_SAFETY_ANALYSIS {
                         if (!leavers_.refuse_by_root(key, rank, text)) return;
                         std::erase_if(noted_, [&](const LocalEvent& event) {
                           return event.kind == LocalEvent::Kind::Ready && event.key == key;
                         });
                       };
  actions.fail = [this](const Status& status) { parts_.board->set_failure(status); };
  actions.end = [this]() HVD_NO_THREAD_SAFETY_ANALYSIS { controller_.end(); };
  actions.conflict =
      [this](int set, const std::string& name, const std::vector<StuckRank>& stuck_ranks)
          HVD_NO_THREAD_SAFETY_ANALYSIS { end_conflict(set, name, stuck_ranks); };
  actions.drop = [this](const UnitKey& key)
                     HVD_NO_THREAD_SAFETY_ANALYSIS { return controller_.drop(key); };
  actions.missing_here = [this](const UnitKey& key) { return controller_.missing_here(key); };
  direct_.add_actions(actions);
  actions.ranks_of = [this](int set) { return table().sets().ranks_unless_removed(set); };
  actions.domain_of = [this](int rank) {
    return parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)];
  };
  return actions;
}

/// Ends the operations that ranks of all domains are stuck with.
void LeaderTask::end_conflict(int set, const std::string& name,
                              const std::vector<StuckRank>& stuck_ranks) {
  std::set<UnitKey> keys;
  for (const auto& stuck_rank : stuck_ranks) keys.insert({set, stuck_rank.kind, name});
  // Ranks here are told who wants what, of which the table may have forgotten some.
  if (table().sets().local_members(set) > 0)
    for (const auto& key : keys) tree_.retell(key);
  controller_.end_conflict(set, name, stuck_ranks);
  std::erase_if(noted_, [&](const LocalEvent& event) {
    return event.kind == LocalEvent::Kind::Ready && keys.contains(event.key);
  });
}

void LeaderTask::note(const Outcomes& outcomes) {
  // Spelled out now: by the time the tree passes it on, the id may stand for another tensor.
  for (const auto& [id, run] : outcomes.introduced) {
    const Unit& unit = table().unit(id);
    // a rank of this domain speaks for itself alone
    if (unit.scope != Scope::World || !parts_.is_here(run.first)) continue;
    const auto& ranks = table().sets().info(unit.key.process_set).ranks;
    const auto place = static_cast<std::size_t>(
        std::lower_bound(ranks.begin(), ranks.end(), run.first) - ranks.begin());
    noted_.push_back(
        {LocalEvent::Kind::Introduced, unit.key, run.first, unit.signatures.of(place)});
  }
  for (const auto& [id, what] : outcomes.host_ready)
    noted_.push_back({LocalEvent::Kind::Ready, table().unit(id).key, -1, nullptr, what});
  for (const auto& [set, rank] : outcomes.joined)
    if (parts_.is_here(rank))
      noted_.push_back({LocalEvent::Kind::Joined, {set, OpKind::Join, {}}, rank});
  if (outcomes.lingering != 0) {
    noted_.push_back({LocalEvent::Kind::Lingering});
    noted_.back().change = outcomes.lingering;
  }
  for (const int rank : outcomes.left)
    if (parts_.is_here(rank)) {
      noted_.push_back({LocalEvent::Kind::Left, {}, rank});
      noted_.back().pledges = outcomes.pledges;
    }
  for (const auto id : outcomes.doubted)
    noted_.push_back({LocalEvent::Kind::Doubted, table().unit(id).key});
  for (const auto& agreed : outcomes.agreed)
    if (const auto& key = table().unit(agreed.id).key;
        key.kind == OpKind::Control && key.name == kRemoveProcessSet && agreed.verdict.ok())
      noted_.push_back({LocalEvent::Kind::Removed, {agreed.what.last, OpKind::Control, {}}});
}

/// Cuts what may be cut now, and announces it.
bool LeaderTask::decide_cuts() {
  bool any = false;
  for (const int set : cutter_.sets_to_cut())
    any = cutter_.cut_world(set, [this, set]() HVD_NO_THREAD_SAFETY_ANALYSIS {
      tree_.announce_cut(set);
    }) || any;
  return any;
}

bool LeaderTask::drive(const Turn& /*turn*/) {
  while (!noted_.empty()) {  // one by one: what follows from one may make void what comes after it
    LocalEvent event = std::move(noted_.front());
    noted_.pop_front();
    tree_.tell(std::move(event));
  }
  bool progressed = false;
  if (tree_.is_root()) {
    // what is agreed, and its cut, travel in one message: nothing more is heard before that
    progressed = tree_.hear();
    progressed = decide_cuts() || progressed;
  } else {
    progressed = tree_.advance();
    for (const auto& credit : cutter_.credits_to_tell())
      tree_.tell_credit(credit.process_set, credit.domain, credit.over);
  }
  if (tree_.is_root() && tree_.all_left() && !table().agreed().has(Scope::World) &&
      !table().all_left()) {
    tree_.announce_end();
    controller_.end();
  }
  progressed = (tree_.is_root() ? tree_.send() : tree_.advance()) || progressed;
  progressed = direct_.drive(tree_) || progressed;
  heartbeat_.beat();
  parts_.board->beat();
  if (progressed) last_traffic_ = Clock::now();
  return progressed;
}

void LeaderTask::tell_blocked(std::vector<BlockedRank> ranks) {
  // it must not pass what is said of before
  if (noted_.empty()) tree_.blocked({parts_.topology.domain, std::move(ranks), {}});
}

void LeaderTask::tell_failure(const Turn& /*turn*/, const Status& status) {
  try {
    tree_.failed(status);
    tree_.advance();
  } catch (...) {
    log(LogLevel::Warning, "the other hosts could not be told of the failure: {}",
        status_of_current_exception().text());
  }
}

void LeaderTask::drain(const Turn& /*turn*/) noexcept {
  try {
    tree_.advance();
  } catch (...) {
    log(LogLevel::Debug, "after the failure: {}", status_of_current_exception().text());
  }
}

bool LeaderTask::drive_direct(const Turn& /*turn*/) {
  parts_.board->beat();
  if (direct_.look(tree_)) last_traffic_ = Clock::now();
  return noted_.empty() && !direct_.has_others();
}

std::vector<int> LeaderTask::awaited(const UnitKey& key) const {
  std::vector<int> awaited = tree_.awaited(key);
  const auto number = tree_.number_of(key);
  if (!awaited.empty() || !number) return awaited;
  const auto missing = direct_.missing(*number);
  for (int rank = 0; rank < parts_.topology.size; ++rank)
    if (std::find(missing.begin(), missing.end(),
                  parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)]) != missing.end())
      awaited.push_back(rank);
  return awaited;
}

bool LeaderTask::expects_messages() const {
  return tree_.is_waiting() || direct_.is_waiting() ||
         Clock::now() - last_traffic_ < kTrafficMemory;
}

}  // namespace hvd
