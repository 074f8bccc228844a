#include "hvd/engine/agreement/cutter.h"

#include <algorithm>
#include <utility>

namespace hvd {

namespace {

std::uint32_t group_of(int process_set) { return static_cast<std::uint32_t>(process_set); }

}  // namespace

Cutter::Cutter(const EngineParts& parts, NegotiationLog& log, EngineMutex& mutex)
    : parts_(parts), log_(log), mutex_(mutex), board_(*parts.board) {}

/// Opens places for the set's next cut, before its record: who reads that may use them at once.
/// Returns false, and nothing has happened, if there are too few.
bool Cutter::open_places(int process_set, std::vector<std::uint64_t>& sequences) {
  const std::size_t count = table().agreed().batches_of_next_cut(process_set);
  sequences = board_.batches().find_places(count);
  for (const auto sequence : sequences) board_.batches().open(sequence, group_of(process_set));
  return sequences.size() == count;
}

void Cutter::cut_if_idle(Transaction& log, int process_set) {
  if (!table().agreed().has(process_set) || board_.batches().open_count(group_of(process_set)) > 0)
    return;
  std::vector<std::uint64_t> sequences;
  if (open_places(process_set, sequences)) {
    log.append(Negotiator::cut_record(process_set, sequences));
  } else {
    // a rank has not looked at its results for a long time; whoever departs last cuts
    mutex_.wake_all_workers();
  }
}

void Cutter::retire(const CutBatch& cut) {
  const int set = cut.plan.process_set;
  if (!board_.batches().state(cut.sequence).retired.load(std::memory_order_acquire)) {
    Transaction log(log_, kCutBytes);
    if (board_.batches().retire(cut.sequence, group_of(set)) && cut.scope == Scope::Domain)
      cut_if_idle(log, set);
    mutex_.wake_waiters();
  }
}

void Cutter::depart(const CutBatch& cut) {
  board_.batches().depart(cut.sequence, table().agreed().local_participants(cut.plan));
  // there may be places now for what the root has decided
  if (cut.scope == Scope::World) mutex_.wake_leader();
  if (!board_.batches().is_over(cut.sequence) || !table().agreed().has(Scope::Domain)) return;
  // Cuts of any set may have been put off because there were no places. Under the lock, so that
  // whoever puts one off sees this departure, or this rank sees what was put off.
  cut_idle_sets();
}

void Cutter::cut_idle_sets() {
  for (const int waiting : table().agreed().sets(Scope::Domain)) {
    Transaction log(log_, kCutBytes);
    cut_if_idle(log, waiting);
  }
}

bool Cutter::cut_world(int process_set, const std::function<void()>& announce) {
  Transaction log(log_, kCutBytes);
  if (!table().agreed().has(process_set)) throw WireError("a cut of nothing");
  // A domain that takes no part in what is cut needs no place for it.
  const bool takes_part = table().agreed().takes_part_next(process_set);
  const auto domains = table().agreed().domains_of_next_cut(process_set);
  std::vector<std::uint64_t> sequences;
  if (takes_part && !open_places(process_set, sequences)) {
    // A rank has not looked at its results for a long time. Said once, or those that can do nothing
    // about it would never sleep.
    if (!std::exchange(told_of_no_places_, true)) mutex_.wake_all_workers();
    return false;
  }
  told_of_no_places_ = false;
  if (announce) announce();
  log.append(Negotiator::cut_record(process_set, sequences));
  WorldSet& set = world_[process_set];
  if (takes_part) set.open.push_back(std::move(sequences));
  const bool without_root = domains.front() != 0;
  set.tells_at_once = set.tells_at_once || without_root;
  if (parts_.topology.domain != 0) return true;
  for (const int domain : domains) ++set.domains[domain].cut;
  if (OfDomain& first = set.domains[domains.front()]; without_root) first.awaited = first.cut;
  return true;
}

void Cutter::look_for_ends(WorldSet& set) {
  set.over += std::erase_if(set.open, [this](const std::vector<std::uint64_t>& batches) {
    return std::all_of(batches.begin(), batches.end(), [this](std::uint64_t sequence) {
      return board_.batches().is_over(sequence) ||
             board_.batches().state(sequence).retired.load(std::memory_order_acquire);
    });
  });
}

std::vector<int> Cutter::sets_to_cut() {
  std::vector<int> sets;
  for (const int process_set : table().agreed().sets(Scope::World)) {
    WorldSet& set = world_[process_set];
    look_for_ends(set);
    if (!set.open.empty()) continue;
    const auto domains = table().agreed().domains_of_next_cut(process_set);
    const bool may_cut = std::all_of(domains.begin(), domains.end(), [&](int domain) {
      if (domain == parts_.topology.domain) return true;
      return set.domains[domain].cut - set.domains[domain].over < kCredit;
    });
    const bool are_over =
        std::all_of(set.domains.begin(), set.domains.end(),
                    [](const auto& other) { return other.second.over >= other.second.awaited; });
    if (may_cut && are_over) sets.push_back(process_set);
  }
  return sets;
}

void Cutter::take_credit(const CutCredit& credit) {
  const auto set = world_.find(credit.process_set);
  if (set == world_.end()) return;  // removed, and nothing more is cut
  OfDomain& domain = set->second.domains[credit.domain];
  if (credit.over > domain.cut) throw WireError("credit for cuts that were not made");
  domain.over = std::max(domain.over, credit.over);
}

std::vector<CutCredit> Cutter::credits_to_tell() {
  std::vector<CutCredit> credits;
  if (parts_.topology.domain == 0) return credits;
  for (auto& [id, set] : world_) {
    look_for_ends(set);
    if (set.over == set.told) continue;
    if (!set.tells_at_once && set.over - set.told < kCredit / 2) continue;
    set.told = set.over;
    set.tells_at_once = set.tells_at_once && !set.open.empty();
    credits.push_back({id, parts_.topology.domain, set.over});
  }
  return credits;
}

void Cutter::forget(int process_set) {
  // What was agreed before is still cut, and needs the credit.
  if (!table().agreed().has(process_set)) world_.erase(process_set);
}

}  // namespace hvd
