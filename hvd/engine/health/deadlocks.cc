#include "hvd/engine/health/deadlocks.h"

#include <algorithm>
#include <utility>

namespace hvd {

namespace {

constexpr auto kSearchInterval = std::chrono::milliseconds(500);
constexpr std::size_t kMostEnded = 8;  // in one search
constexpr std::size_t kRecordBytes = 4096;

}  // namespace

void Deadlocks::look() {
  tell_of_this_rank();
  const auto now = Clock::now();
  if (now < next_search_) return;
  next_search_ = now + kSearchInterval;
  int first = Board::kNobody;
  int count = 0;
  for (int index = 0; index < board_.ranks(); ++index) {
    if (board_.rounds().blocked(index) == 0) continue;
    if (count++ == 0) first = index;
  }
  // Among the domain's ranks the first blocked one speaks for all, to the other domains the leader.
  if (first == board_.self() && count > 1) end_here();
  if (leader_ == nullptr) return;
  std::vector<BlockedRank> report;
  if (count > 0) {
    Transaction log(log_, 0);
    report = blocked_here();
  }
  const auto waits_elsewhere = [&](const UnitKey& key) {
    return table().sets().scope_of(key.process_set) == Scope::World;
  };
  // Of what ends within the domain the root does not hear.
  std::erase_if(report, [&](const BlockedRank& rank) {
    return !std::all_of(rank.waits.begin(), rank.waits.end(), waits_elsewhere);
  });
  for (auto& rank : report)
    std::erase_if(rank.submitted, [&](const UnitKey& key) { return !waits_elsewhere(key); });
  leader_->tell_blocked(std::move(report));
}

/// Returns false if its end waits for no submission.
bool Deadlocks::add_waited_for(const Entry& entry) {
  if (entry.state != EntryState::Waiting || !entry.announced) return false;
  if (std::find(units_.begin(), units_.end(), entry.unit) == units_.end())
    units_.push_back(entry.unit);
  return true;
}

/// None if one of the threads, or a function that is to be called at the end of an operation, waits
/// for something else.
void Deadlocks::find_waited_for() {
  units_.clear();
  for (const auto& of_thread : waiting_) {
    const Entry* found = nullptr;
    const auto look = [&](const Entry& entry) {
      if (entry.pending.get() == of_thread.pending) found = &entry;
    };
    ledger_.for_each(look);
    if (found == nullptr) {  // or it waits for one of its name to end
      queue_.for_each(look);
      if (found != nullptr) found = ledger_.find(found->key);
    }
    if (found == nullptr || !add_waited_for(*found)) return units_.clear();
  }
  if (units_.empty() || !continuations_.are_waiting()) return;
  bool all_wait = true;
  ledger_.for_each([&](const Entry& entry) HVD_REQUIRES(engine_mutex) {
    if (entry.pending->callbacks) all_wait = add_waited_for(entry) && all_wait;
  });
  if (!all_wait) units_.clear();
}

/// Returns whether a submission of this rank will be made when no thread of the program does
/// anything more: its name is free, or will be, as all ranks have submitted what has it now.
bool Deadlocks::will_submit() const {
  bool will = false;
  queue_.for_each([&](const Entry& entry) HVD_REQUIRES(engine_mutex) {
    const Entry* const before = ledger_.find(entry.key);
    if (before == nullptr || before->state != EntryState::Waiting || !before->announced)
      will = true;
  });
  return will;
}

void Deadlocks::tell_of_this_rank() {
  const auto now = Clock::now();
  callers_.if_all_wait(waiting_, continuations_.are_called());
  find_waited_for();
  if (units_.empty() || waiting_ != seen_ || will_submit()) {
    std::swap(seen_, waiting_);
    since_ = now;
    return board_.rounds().set_blocked(0);
  }
  if (now - since_ < kGrace) return;
  for (const auto& unit : units_) board_.rounds().set_stuck(unit.id);
  board_.rounds().set_blocked(static_cast<std::uint32_t>(units_.size()));
}

/// A rank has said how many units its threads wait for. It is blocked as long as it is stuck in so
/// many: whoever is released is not.
std::vector<BlockedRank> Deadlocks::blocked_here() const {
  std::vector<BlockedRank> all;
  const auto& domain = parts_.topology.domain_ranks;
  for (int index = 0; index < board_.ranks(); ++index) {
    const std::uint32_t waits = board_.rounds().blocked(index);
    if (waits == 0) continue;
    BlockedRank rank{domain[static_cast<std::size_t>(index)], {}, {}};
    table().for_each_unit([&](const Unit& unit) {
      if (!std::ranges::binary_search(table().sets().info(unit.key.process_set).ranks, rank.rank))
        return;
      const bool said = unit.scope == Scope::World && unit.undecided;
      if (said || board_.rounds().has_arrived(unit.id, index)) rank.submitted.insert(unit.key);
      if (board_.rounds().is_stuck(unit.id, index, said) && !unit.queued &&
          !board_.rounds().is_promised(unit.id))
        rank.waits.push_back(unit.key);
    });
    std::ranges::sort(rank.waits);
    if (rank.waits.size() >= waits) all.push_back(std::move(rank));
  }
  return all;
}

void Deadlocks::end_here() {
  Transaction log(log_, kMostEnded * kRecordBytes);
  const auto found = find_deadlock(blocked_here(), [&](int process_set) {
    return table().sets().ranks_unless_removed(process_set);
  });
  const std::string who = found.empty() ? "" : found.front().text;
  if (std::exchange(found_, who) != who) return;
  for (const auto& [key, missing, text] : found) {
    if (table().sets().scope_of(key.process_set) == Scope::World) continue;  // the root's to end
    const Unit* const unit = table().find(key);
    // Who has not read the last cut still needs the slots' words: at the next search.
    if (unit == nullptr || unit->queued || unit->cut_at > board_.log().slowest_reader() ||
        board_.rounds().is_promised(unit->id))
      continue;
    const Bytes record = Negotiator::refusal(unit->id, missing, text);
    if (!log.fits(record.size())) return;
    board_.rounds().void_slot(unit->id, unit->slots);
    log.append(record);
  }
}

}  // namespace hvd
