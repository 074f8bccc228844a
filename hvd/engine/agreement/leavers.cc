#include "hvd/engine/agreement/leavers.h"

#include <algorithm>
#include <map>

#include "hvd/engine/core/repeated_op.h"

namespace hvd {

namespace {

constexpr std::size_t kRecordBytes = 64;

}  // namespace

bool Leavers::leave(bool lingers) {
  std::size_t entries = ledger_.size();
  queue_.for_each([&](const Entry&) { ++entries; });
  Transaction log(log_, kRecordBytes + sizeof(Pledge) * entries);
  bool promised = false;
  ledger_.for_each([&](const Entry& entry) {
    promised = promised || (entry.op != nullptr && entry.state == EntryState::Waiting &&
                            board_.rounds().awaits_promised(entry.unit.id));
  });
  if (promised) return false;
  lingers_ = lingers;
  if (lingers) log.append(Negotiator::lingering(1));
  log.append(Negotiator::leaving(parts_.topology.rank, pledges()));
  return true;
}

void Leavers::end_lingering() {
  Transaction log(log_, kRecordBytes);
  lingers_ = false;
  log.append(Negotiator::lingering(-1));
}

void Leavers::leave_elsewhere(int rank) {
  Transaction log(log_, kRecordBytes);
  log.append(Negotiator::leaving(rank));
}

std::vector<Pledge> Leavers::pledges() const {
  std::map<std::uint32_t, std::uint32_t> rounds;
  queue_.for_each([&](const Entry& entry) {
    if (const Unit* unit = table().find(entry.key)) ++rounds[unit->id];
  });
  // A round of the fast path ends without a record, so its arrival is not counted: who looks for it
  // finds it on the board. Between domains it is negotiated from now on.
  ledger_.for_each([&](const Entry& entry) {
    const bool records = entry.op == nullptr || entry.op->is_direct();
    const bool waits = entry.state == EntryState::Waiting && entry.announced && records;
    if (waits && board_.rounds().has_arrived(entry.unit.id, board_.self())) ++rounds[entry.unit.id];
  });
  std::vector<Pledge> pledges;
  for (const auto& [id, count] : rounds) pledges.push_back({id, count});
  return pledges;
}

/// Returns false if other ranks must read more of the log first.
bool Leavers::try_to_doubt(UnitRef ref) {
  Transaction log(log_, kRecordBytes);
  const Entry* const entry = ledger_.find(ref);
  if (entry == nullptr || entry->state != EntryState::Waiting || !entry->announced ||
      !table().knows(ref.id))
    return true;
  const Unit& unit = table().unit(ref.id);
  auto leavers = table().leavers_of(unit.key);
  std::erase(leavers, parts_.topology.rank);  // it takes part in what it waits for
  if (leavers.empty()) return true;
  if (unit.scope == Scope::World) {
    // asked about again where it is negotiated
    if (board_.rounds().is_promised(ref.id)) return true;
    log.append(Negotiator::doubt(ref.id));
    return true;
  }
  const auto never_comes = [&](int rank) {
    return !board_.rounds().has_arrived(ref.id, parts_.topology.index_here(rank)) &&
           !table().has_pledged(rank, unit.key);
  };
  const auto blocks = std::find_if(leavers.begin(), leavers.end(), never_comes);
  if (blocks == leavers.end()) return true;
  // who has not read the last cut still needs the slots' words
  if (unit.cut_at > board_.log().slowest_reader()) return false;
  board_.rounds().void_slot(ref.id, unit.slots);
  log.append(Negotiator::refusal(ref.id, *blocks));
  return true;
}

void Leavers::doubt(UnitRef unit) {
  ReaderWait readers(log_);
  while (!try_to_doubt(unit))
    if (!readers.nudge()) return;
}

void Leavers::doubt_all() {
  std::vector<UnitRef> waiting;
  ledger_.for_each([&](const Entry& entry) {
    if (entry.announced && entry.state == EntryState::Waiting) waiting.push_back(entry.unit);
  });
  for (const auto& unit : waiting) doubt(unit);
}

bool Leavers::try_to_refuse(const UnitKey& key, int left_rank, const std::string& text,
                            bool& is_void) {
  Transaction log(log_, kRecordBytes + text.size());
  const Unit* unit = table().find(key);
  is_void = unit == nullptr || !unit->queued;
  // if it is queued, nobody here waits for it any more
  if (unit == nullptr || unit->queued) return true;
  if (unit->cut_at > board_.log().slowest_reader()) return false;
  board_.rounds().void_slot(unit->id, unit->slots);
  log.append(Negotiator::refusal(unit->id, left_rank, text));
  return true;
}

bool Leavers::refuse_by_root(const UnitKey& key, int left_rank, const std::string& text) {
  bool is_void = false;
  ReaderWait readers(log_);
  while (!try_to_refuse(key, left_rank, text, is_void))
    if (!readers.nudge()) return false;
  return is_void;
}

}  // namespace hvd
