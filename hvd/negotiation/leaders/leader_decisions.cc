#include "hvd/negotiation/leaders/leader_decisions.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hvd {

void LeaderDecisions::count_ready(std::uint32_t id, int subtree, const Agreement& what) {
  counts_.add(id, subtree, what);
  pass_on_if_complete(id);
  if (!departed_.is_empty() && counts_.contains(id))
    refuse_if_hopeless(UnitKey(*numbers_.key_of(id)));
}

void LeaderDecisions::pass_on_if_complete(std::uint32_t id) {
  const UnitKey& key = *numbers_.key_of(id);
  auto all = counts_.take_if_complete(id, key, actions_.ranks_of(key.process_set));
  if (!all) return;
  if (links_.is_root()) return decide(id, std::move(*all));
  links_.send_up(LeaderItems::ready(id, *all));
}

void LeaderDecisions::decide(std::uint32_t id, Agreement what) {
  const UnitKey key = *numbers_.key_of(id);
  // A rank that joins last has seen everything decided that it was needed for, and so has this: the
  // others' joins came before.
  for (const int rank : what.absent) counts_.note_join(key.process_set, rank);
  if (key.kind == OpKind::Join) what.last = counts_.last_joined(key.process_set);
  links_.send_down(LeaderItems::agree(id, what));
  actions_.agree(key, what);
  decided(id);
}

void LeaderDecisions::decided(std::uint32_t id) {
  numbers_.decided(id);
  const UnitKey* const key = numbers_.key_of(id);
  if (key == nullptr) return;
  over(id);
  counts_.erase(id);
  departed_.decided(*key);
  if (key->kind == OpKind::Join) counts_.end_join(key->process_set);
  stuck_names_.decided(key->process_set, key->name);
}

void LeaderDecisions::learn_joined(int process_set, int rank) {
  if (actions_.ranks_of(process_set) == nullptr) return;
  counts_.join(process_set, rank);
  for (const auto id : counts_.waiting())
    if (counts_.contains(id) && numbers_.key_of(id)->process_set == process_set)
      pass_on_if_complete(id);
  if (!links_.is_root()) links_.send_up(LeaderItems::joined(process_set, rank));
}

/// A rank of `subtree` has left. Only the root can say what can never be complete without it, so it
/// must know what the rank still takes part in: what it had arrived at, of which its domain tells,
/// and what its part of the tree was said to be ready for, on the way up: each leader adds what
/// waits with it for its other subtrees.
void LeaderDecisions::left(int rank, Pledges pledges, int subtree) {
  for (const auto id : counts_.waiting()) {
    const UnitKey& key = *numbers_.key_of(id);
    const auto* ranks = actions_.ranks_of(key.process_set);
    const bool in_set = ranks != nullptr && std::binary_search(ranks->begin(), ranks->end(), rank);
    if (in_set && counts_.is_ready(id, subtree, rank)) ++pledges[key];
  }
  if (!links_.is_root()) {
    links_.send_up(LeaderItems::leave_up(rank, pledges));
    // It must not overtake what was decided before.
    return inbox_.is_waiting() ? inbox_.wait_with(LeaderItems::leave(rank), subtree)
                               : spread_leaving(rank, subtree);
  }
  departed_.add(rank, pledges);
  spread_leaving(rank, subtree);
  std::vector<UnitKey> waiting;
  for (const auto id : counts_.waiting()) waiting.push_back(*numbers_.key_of(id));
  for (const auto& key : waiting) refuse_if_hopeless(key);
}

/// `from`: the neighbour that has said so, or this domain.
void LeaderDecisions::spread_leaving(int rank, int from) {
  links_.send_down(LeaderItems::leave(rank), from);
  if (from != links_.self()) actions_.leave(rank);  // this domain's log says so already
}

/// A rank of this subtree waits for what a rank that has left takes part in.
void LeaderDecisions::doubted(const UnitKey& key) {
  links_.is_root() ? refuse_if_hopeless(key) : links_.send_up(LeaderItems::doubt(key));
}

/// Root: says that the tensor can never be complete, if that is so.
void LeaderDecisions::refuse_if_hopeless(const UnitKey& key) {
  const auto* ranks = actions_.ranks_of(key.process_set);
  if (ranks == nullptr) return;
  if (is_promised(key)) return static_cast<void>(put_off_.insert(key));
  const auto has_joined = [&](int rank) { return counts_.has_joined(key.process_set, rank); };
  if (const auto rank = departed_.blocker_of(key, *ranks, has_joined)) refuse(key, *rank);
}

/// Whoever waits for the tensor waits for it no more; who submits it again introduces it anew. Its
/// number is given up, so that what is said of the round that is over finds nothing to count for.
void LeaderDecisions::refuse(const UnitKey& key, int rank, const std::string& text) {
  links_.send_down(LeaderItems::refuse(key, rank, text));
  numbers_.refused();
  stuck_names_.decided(key.process_set, key.name);
  departed_.forget(key);
  unsaid_.drop_ready(key);
  forget(key);
  actions_.refuse(key, rank, text);
}

/// Root: ends what blocked ranks wait for and can never get.
void LeaderDecisions::end_deadlocks() {
  const auto decision = [this](const UnitKey& key) {
    return last_decision(key.process_set, key.name);
  };
  const auto found = blocked_.find(actions_.ranks_of, decision);
  const std::string who = found.empty() ? "" : found.front().text;
  if (std::exchange(deadlock_, who) != who) return;
  for (const auto& [key, missing, text] : found)
    if (!is_promised(key)) refuse(key, missing, text);
}

/// Root: ranks of a domain are stuck.
void LeaderDecisions::note_stuck(const StuckReport& report) {
  const auto* ranks = actions_.ranks_of(report.process_set);
  // What was said before a decision under that name was known there may be out of date.
  if (ranks == nullptr || report.last_decision != last_decision(report.process_set, report.name))
    return;
  if (auto all = stuck_names_.add(report, *ranks))
    end_conflict({report.process_set, report.name, 0, std::move(*all)});
}

/// Drops whatever readiness was counted for the operations that are in conflict.
void LeaderDecisions::end_conflict(const StuckReport& report) {
  links_.send_down(LeaderItems::conflict(report));
  std::vector<UnitKey> keys;
  for (const auto& stuck_rank : report.ranks) {
    keys.push_back({report.process_set, stuck_rank.kind, report.name});
    unsaid_.drop_ready(keys.back());
    if (const auto id = numbers_.find(keys.back())) {
      counts_.erase(*id);
      over(*id);
    }
  }
  numbers_.in_conflict(keys);
  stuck_names_.decided(report.process_set, report.name);
  if (actions_.ranks_of(report.process_set) != nullptr)
    actions_.conflict(report.process_set, report.name, report.ranks);
}

void LeaderDecisions::forget(const UnitKey& key) {
  const auto id = numbers_.find(key);
  if (!id) return;
  stuck_names_.forget(key.process_set, key.name);
  counts_.erase(*id);
  put_off_.erase(key);
  if (actions_.forgotten) actions_.forgotten(*id);
  numbers_.forget(key);
}

void LeaderDecisions::over(std::uint32_t id) {
  if (actions_.over) actions_.over(id);
}

bool LeaderDecisions::is_promised(const UnitKey& key) const {
  const auto id = numbers_.find(key);
  return id && actions_.is_promised && actions_.is_promised(*id);
}

/// Root: looks again at what may never be complete, and was prepared.
void LeaderDecisions::refuse_put_off() {
  const auto waiting = std::exchange(put_off_, {});
  for (const auto& key : waiting) refuse_if_hopeless(key);
}

/// Returns what changes with each end of a round under the name: rounds that the leaders end among
/// themselves are no decisions, but are counted like them.
std::uint64_t LeaderDecisions::last_decision(int process_set, const std::string& name) const {
  std::uint64_t rounds = 0;
  if (actions_.rounds_over)
    for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
      if (const auto id = numbers_.find({process_set, static_cast<OpKind>(kind), name}))
        rounds += actions_.rounds_over(*id);
  return numbers_.last_decision(process_set, name) + (rounds << 32);
}

void LeaderDecisions::retire(std::vector<std::uint32_t> ids) {
  links_.send_down(LeaderItems::retire(ids));
  numbers_.begin_retiring(std::move(ids), links_.children(), actions_.drop);
  answer_if_complete();
}

void LeaderDecisions::answer_if_complete() {
  if (!numbers_.have_all_answered()) return;
  if (!links_.is_root()) return links_.send_up(LeaderItems::retired(numbers_.in_use()));
  const auto given_up = numbers_.given_up();
  links_.send_down(LeaderItems::forget(given_up));
  end_retiring(given_up);
}

void LeaderDecisions::end_retiring(const std::vector<std::uint32_t>& given_up) {
  for (const auto id : given_up)
    if (const UnitKey* const key = numbers_.key_of(id)) forget(UnitKey(*key));
  numbers_.end_retiring();
}

void LeaderDecisions::stuck(int process_set, const std::string& name,
                            const std::vector<StuckRank>& stuck_ranks) {
  if (!unsaid_.is_empty()) return;  // it must not pass what is said of before
  const StuckReport report{process_set, name, last_decision(process_set, name), stuck_ranks};
  if (!stuck_names_.note_said(report)) return;
  links_.is_root() ? note_stuck(report) : links_.send_up(LeaderItems::stuck(report));
}

void LeaderDecisions::blocked(BlockedReport report) {
  // What this domain has still to say must not be passed: the same is said again after it.
  if (!unsaid_.is_empty() || inbox_.is_waiting()) report.ranks.clear();
  for (const auto& rank : report.ranks)
    for (const auto& key : rank.submitted)
      report.last_decisions[key] = last_decision(key.process_set, key.name);
  const bool is_new = blocked_.note_said(report);
  if (!links_.is_root() && is_new) links_.send_up(LeaderItems::blocked(report));
  if (!links_.is_root()) return;
  if (is_new) blocked_.add(std::move(report));
  end_deadlocks();
}

void LeaderDecisions::late(LateReport report, int subtree) {
  const auto* const ranks = actions_.ranks_of(report.key.process_set);
  if (ranks == nullptr) return;
  add_missing(report, subtree, *ranks);
  if (!links_.is_root()) return links_.send_up(LeaderItems::late(report));
  if (report.names_somebody()) actions_.fail(late_status(std::move(report)));
}

/// Adds those ranks of the set that lack, of the parts of this leader's subtree but the one that
/// the report comes from.
void LeaderDecisions::add_missing(LateReport& report, int subtree,
                                  const std::vector<int>& ranks) const {
  if (actions_.missing_here) {
    const auto here = actions_.missing_here(report.key);
    report.missing.insert(report.missing.end(), here.begin(), here.end());
  }
  const auto id = numbers_.find(report.key);
  const bool is_counted = id && counts_.contains(*id);
  // all of them are ready, and it was passed on
  if (!is_counted && !report.names_somebody()) return;
  std::map<int, std::vector<int>> lacking;  // by part
  for (const int rank : ranks) {
    const int part = links_.subtree_of(actions_.domain_of(rank));
    const bool is_excused =
        report.key.kind != OpKind::Join && counts_.has_joined(report.key.process_set, rank);
    if (part < 0 || part == subtree || part == links_.self() || is_excused) continue;
    if (!is_counted || !counts_.has_part(*id, part)) lacking[part].push_back(rank);
  }
  for (auto& [part, of_part] : lacking) {
    if (of_part.size() == 1) {
      report.missing.push_back(of_part.front());
    } else {
      report.some_of.push_back(std::move(of_part));
    }
  }
}

/// Nobody waits any more for what was to happen in a process set that is gone.
void LeaderDecisions::removed(int process_set) {
  for (const auto& key : numbers_.keys_of_set(process_set)) forget(key);
  counts_.forget_set(process_set);
  stuck_names_.forget_set(process_set);
  departed_.forget_set(process_set);
  unsaid_.forget_set(process_set);
}

}  // namespace hvd
