#include "hvd/engine/agreement/controller.h"

#include <algorithm>

#include "hvd/base/text.h"

namespace hvd {

namespace {

constexpr std::size_t kEvictionBytes = 16;      // of the log, for one
constexpr std::size_t kEvictionsAtOnce = 1024;  // a group that needs more of them comes again
constexpr std::size_t kSmallRecordBytes = 64;

std::uint32_t slots_for(const Signature& signature) {
  return std::max(1U, static_cast<std::uint32_t>(signature.tensors.size()));
}

std::size_t introduction_budget(const UnitKey& key, const Signature& signature) {
  return NegotiationLog::bytes_of_record(introduction_bytes(key, signature)) +
         kEvictionsAtOnce * kEvictionBytes;
}

}  // namespace

std::size_t introduction_bytes(const UnitKey& key, const Signature& signature) {
  std::size_t bytes = 128 + key.name.size();
  for (const auto& tensor : signature.tensors)
    bytes += 32 + (tensor.shape.size() + tensor.splits.size()) * sizeof(std::int64_t);
  return bytes;
}

// ----------------------------------------------------------------------------------- introductions

Controller::Announced Controller::announce(Entry& entry, Ledger& ledger, std::uint32_t& arrived) {
  const int set = entry.key.process_set;
  const int rank = parts_.topology.rank;
  log_.read();
  const auto& joined = table().sets().joined(set);
  const bool has_joined = std::binary_search(joined.begin(), joined.end(), rank);
  if (has_joined && entry.key.kind != OpKind::Join) return Announced::Joined;
  if (!has_joined && entry.key.kind == OpKind::Join && table().sets().has(set) && !join(set))
    return Announced::NoRoom;
  while (true) {
    if (!introduce(entry, ledger)) return Announced::NoRoom;
    if (!table().sets().has(set)) return Announced::SetRemoved;
    const Unit& unit = table().unit(entry.unit.id);
    for (std::uint32_t i = 0; i < unit.slots; ++i)
      board_.rounds().set_location(unit.id + i,
                                   i < entry.locations.size() ? entry.locations[i] : 0);
    if (!arrive(entry, arrived)) return Announced::NoRoom;
    if (arrived == 0) continue;  // evicted between the two: introduce it again
    entry.announced = true;
    return Announced::Yes;
  }
}

/// Returns false, and nothing has happened, if it removes a set in which this rank awaits a
/// prepared round: that ends before, on all ranks.
bool Controller::arrive(const Entry& entry, std::uint32_t& arrived) {
  if (entry.key.kind != OpKind::Control || entry.key.name != kRemoveProcessSet) {
    arrived = board_.rounds().arrive(entry.unit.id, entry.unit.generation);
    return true;
  }
  // under which others prepare the round, unless they see this arrival
  const BoardLock lock(board_);
  if (table().sets().has(entry.signature.root) && awaits_promised(entry.signature.root))
    return false;
  arrived = board_.rounds().arrive(entry.unit.id, entry.unit.generation);
  return true;
}

bool Controller::introduce(Entry& entry, Ledger& ledger) {
  const int rank = parts_.topology.rank;
  log_.read();
  if (!table().sets().has(entry.key.process_set)) return true;
  const Unit* unit = table().find(entry.key);
  if (unit == nullptr || unit->slots < slots_for(entry.signature) ||
      !table().introduced(*unit, rank, entry.signature)) {
    Room room = Room::Now;
    {
      Transaction log(log_, introduction_budget(entry.key, entry.signature));
      if (table().sets().has(entry.key.process_set))
        room = introduce_in(log, entry.key, rank, entry.signature);
    }
    if (room == Room::None)
      throw BackendError(formatted(
          "more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
    if (room != Room::Now) return false;
    unit = table().find(entry.key);
    entry.repeats = false;
  }
  if (unit != nullptr) ledger.bind(entry, unit->ref());
  return true;
}

Controller::Room Controller::introduce_in(Transaction& log, const UnitKey& key, int rank,
                                          const Signature& signature) {
  const Room room =
      make_room_for(log, key, slots_for(signature), introduction_bytes(key, signature));
  if (room == Room::Now)
    log.append(*table().introduction(key, rank, signature, [this](std::uint32_t slot) {
      return board_.rounds().generation(slot);
    }));
  return room;
}

void Controller::introduce_remote(const UnitKey& key, Runs ranks, const Signature& signature) {
  for (const int rank : parts_.topology.domain_ranks) remove(ranks, {rank, 1});
  if (ranks.empty()) return;
  const std::size_t bytes = introduction_bytes(key, signature) + ranks.size() * sizeof(Run);
  ReaderWait readers(log_);
  while (true) {
    {
      Transaction log(log_, introduction_budget(key, signature) + ranks.size() * sizeof(Run));
      if (!table().sets().has(key.process_set)) return;
      const Unit* unit = table().find(key);
      if (unit != nullptr && table().introduced(*unit, ranks, signature)) return;
      // Without room it is told again when this domain needs it: when a rank here introduces it, or
      // when it is agreed.
      const Room room = unit == nullptr ? make_room(log, slots_for(signature), bytes) : Room::Now;
      if (room == Room::Now)
        log.append(*table().introduction(key, ranks, signature, [this](std::uint32_t slot) {
          return board_.rounds().generation(slot);
        }));
      if (room != Room::AfterReading) return;  // done, or it is told again later
    }
    if (!readers.nudge()) board_.failure().raise();
  }
}

bool Controller::drop(const UnitKey& key) {
  Transaction log(log_, kEvictionBytes);
  const Unit* unit = table().find(key);
  if (unit == nullptr) return true;
  const std::uint32_t id = unit->id;
  return is_evictable(id) && evict(log, id);
}

/// Returns false, and nothing has happened, if a rank has arrived meanwhile.
bool Controller::evict(Transaction& log, std::uint32_t id) {
  const Unit& unit = table().unit(id);
  if (!table().sets().has(unit.key.process_set)) {
    board_.rounds().void_slot(id, unit.slots);  // whoever has arrived has failed
  } else if (!board_.rounds().evict(id)) {
    return false;
  }
  log.append(Negotiator::eviction(id));
  return true;
}

void Controller::evict_removed() {
  for (const int set : table().sets().removed())
    for (const Unit* unit : table().units_of(set)) {
      const std::uint32_t id = unit->id;
      if (!is_evictable(id)) continue;
      Transaction log(log_, kEvictionBytes);
      if (table().knows(id) && !table().sets().has(table().unit(id).key.process_set) &&
          is_evictable(id))
        evict(log, id);
      break;  // the list may have changed; the next time brings the next
    }
}

bool Controller::is_evictable(std::uint32_t id) const {
  // Its slots may be given to another tensor once nobody has arrived, its last batch is cut, and
  // every rank has read that record and with it the locations. What other domains have said of it
  // the leader tree remembers.
  const Unit& unit = table().unit(id);
  const int set = unit.key.process_set;
  if (!table().sets().has(set))
    return !unit.queued &&
           std::max(unit.cut_at, table().sets().removed_at(set)) <= board_.log().slowest_reader() &&
           board_.rounds().are_results_taken(id);
  return !unit.undecided && board_.rounds().arrivals(id) == 0 &&
         unit.cut_at <= board_.log().slowest_reader() && board_.rounds().are_results_taken(id);
}

Controller::Room Controller::make_room_for(Transaction& log, const UnitKey& key,
                                           std::uint32_t slots, std::size_t introduction) {
  const Unit* unit = table().find(key);
  if (unit == nullptr) return make_room(log, slots, introduction);
  // A name that is used again for more tensors moves. Where a rank has arrived with fewer, or its
  // domain is ready, the ranks disagree, and that can be said without slots.
  const bool settled =
      board_.rounds().arrivals(unit->id) == 0 && (!unit->undecided || unit->queued);
  if (unit->slots >= slots || !settled) return Room::Now;
  if (unit->queued) return Room::AfterCutting;
  if (!is_evictable(unit->id))
    return board_.rounds().arrivals(unit->id) > 0 ? Room::Now : Room::AfterReading;
  if (!evict(log, unit->id)) return Room::Now;
  return make_room(log, slots, introduction);
}

Controller::Room Controller::make_room(Transaction& log, std::uint32_t slots,
                                       std::size_t introduction) {
  while (!table().has_free_slots(slots)) {
    if (const auto id =
            table().oldest([this](std::uint32_t candidate) { return is_evictable(candidate); })) {
      if (!log.fits(introduction + kEvictionBytes)) return Room::AfterReading;
      static_cast<void>(evict(log, *id));
      continue;
    }
    const auto unread = [this](std::uint32_t id) {
      const Unit& unit = table().unit(id);
      return table().sets().has(unit.key.process_set)
                 ? !unit.undecided && board_.rounds().arrivals(id) == 0
                 : !unit.queued;
    };
    const auto uncut = [this](std::uint32_t id) {
      return table().unit(id).queued && board_.rounds().arrivals(id) == 0;
    };
    return table().oldest(unread)  ? Room::AfterReading
           : table().oldest(uncut) ? Room::AfterCutting
                                   : Room::None;
  }
  return Room::Now;
}

// -------------------------------------------------------------------------------------- agreements

bool Controller::agree_if_complete(const UnitKey& key, std::uint32_t id, std::uint32_t arrived,
                                   bool cuts) {
  if (arrived == table().sets().local_members(key.process_set)) {
    agree(id, cuts);
    return true;
  }
  // A rank that has joined meanwhile may have looked here before this one arrived: either it has
  // seen the arrival, or this rank sees its record: arrivals and the log's tail are sequentially
  // consistent.
  log_.read();
  if (table().sets().joined(key.process_set).empty() || !is_complete(id)) return false;
  agree(id, cuts);
  return true;
}

std::vector<int> Controller::absent_from(const Unit& unit) const {
  std::vector<int> absent;
  if (unit.key.kind == OpKind::Join) return absent;
  for (const int rank : table().sets().joined(unit.key.process_set)) {
    const int index = parts_.topology.index_here(rank);
    if (index >= 0 && !board_.rounds().has_arrived(unit.id, index)) absent.push_back(rank);
  }
  return absent;
}

bool Controller::is_complete(std::uint32_t id) const {
  if (!table().knows(id) || !table().sets().has(table().unit(id).key.process_set)) return false;
  const Unit& unit = table().unit(id);
  const std::uint32_t arrived = board_.rounds().arrivals(id);
  return arrived > 0 &&
         arrived + absent_from(unit).size() == table().sets().local_members(unit.key.process_set);
}

bool Controller::have_read(const std::vector<int>& ranks, std::uint64_t position) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return board_.log().read_position(parts_.topology.index_here(rank)) >= position;
  });
}

void Controller::agree(std::uint32_t id, bool cuts) {
  ReaderWait readers(log_);
  while (!try_to_agree(id, cuts))
    if (!readers.nudge()) return;
}

Agreement Controller::agreement_of(const Unit& unit) const {
  const auto& set = table().sets().info(unit.key.process_set);
  Agreement what;
  what.present.assign(unit.slots, false);
  what.absent = absent_from(unit);
  // Not the rank that says so: it may be overtaken between joining and arriving here.
  what.last = unit.key.kind == OpKind::Join ? table().sets().last_joined(unit.key.process_set)
                                            : parts_.topology.rank;
  const auto& domain = parts_.topology.domain_ranks;
  for (std::size_t index = 0; index < domain.size(); ++index) {
    if (!std::binary_search(set.ranks.begin(), set.ranks.end(), domain[index])) continue;
    if (std::binary_search(what.absent.begin(), what.absent.end(), domain[index])) continue;
    for (std::uint32_t i = 0; i < unit.slots; ++i)
      if ((board_.rounds().coming_location(unit.id + i, static_cast<int>(index)) & kAbsent) == 0)
        what.present[i] = true;
  }
  return what;
}

/// Returns false if a rank that has joined must read more of the log first.
bool Controller::try_to_agree(std::uint32_t id, bool cuts) {
  const Unit& before = table().unit(id);
  const std::size_t bytes =
      before.slots / 8 + 4 * table().sets().info(before.key.process_set).ranks.size() + 128;
  Transaction log(log_, bytes + Cutter::kCutBytes);
  if (board_.rounds().is_promised(id)) return true;  // the leader alone says what comes of it
  Agreement what;
  std::uint32_t arrived = 0;
  do {
    if (!board_.rounds().await_unclaimed(id)) return true;
    arrived = board_.rounds().arrivals(id);
    // Two may find a unit complete, where ranks have joined or are on the fast path; the first to
    // come says so.
    if (!is_complete(id)) return true;
    what = agreement_of(table().unit(id));
    // One that has joined does not hold up a new round by arriving late. Before the slot's words
    // are written anew it must have read the cut of the last round, in which it may have taken
    // part.
    if (!have_read(what.absent, table().unit(id).cut_at)) return false;
  } while (!board_.rounds().claim(id, table().unit(id).generation, arrived));
  const Unit& unit = table().unit(id);
  const bool world = unit.scope == Scope::World;
  // Before the record: whoever reads it may arrive at the slot again at once.
  board_.rounds().reset_arrivals(id, unit.slots);
  log.append(world ? Negotiator::host_readiness(id, what) : Negotiator::agreement(id, what));
  if (world) {
    mutex_.wake_leader();  // it has something to pass on
  } else if (cuts) {
    cutter_.cut_if_idle(log, unit.key.process_set);
  }
  return true;
}

void Controller::agree_by_root(const UnitKey& key, const Agreement& what,
                               const std::function<void()>& retell) {
  // All domains keep the same queue, also of what none of their ranks takes part in, and which they
  // may have forgotten. Or have forgotten in the middle of the ranks' introductions, and learnt
  // anew from the rest of them.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    {
      Transaction log(log_, 64 + what.present.size() / 8 + what.absent.size() * sizeof(int));
      if (!table().sets().has(key.process_set)) return;
      const Unit* unit = table().find(key);
      if (unit != nullptr && (table().has_introduced_all(*unit, what.absent) || i + 1 == kTries))
        return log.append(Negotiator::agreement(unit->id, what));
    }
    retell();
  }
  throw BackendError(
      formatted("more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
}

// --------------------------------------------------------------------------------- ranks that join

bool Controller::awaits_promised(int process_set) const {
  if (table().sets().scope_of(process_set) == Scope::Domain) return false;
  const auto units = table().units_of(process_set);
  return std::any_of(units.begin(), units.end(), [this](const Unit* unit) {
    return board_.rounds().awaits_promised(unit->id);
  });
}

/// Returns false, and nothing has happened, if another thread of this rank waits for a prepared
/// round: the others are to hear of this after its end.
bool Controller::join(int process_set) {
  const int rank = parts_.topology.rank;
  {
    Transaction log(log_, kSmallRecordBytes);
    if (!table().sets().has(process_set)) return true;  // removed meanwhile
    if (awaits_promised(process_set)) return false;
    log.append(Negotiator::joining(process_set, rank));
  }
  std::vector<std::uint32_t> complete;
  for (const Unit* unit : table().units_of(process_set))
    if (is_complete(unit->id)) complete.push_back(unit->id);
  for (const auto id : complete)
    if (table().knows(id)) agree(id);
  Transaction log(log_, kSmallRecordBytes);
  if (table().sets().has(process_set)) log.append(Negotiator::joined_up(process_set, rank));
  return true;
}

void Controller::end() {
  Transaction log(log_, kSmallRecordBytes);
  log.append(Negotiator::end());
}

// --------------------------------------------------------------------------------------- conflicts

std::vector<StuckRank> Controller::stuck_here(int process_set, const std::string& name) const {
  std::vector<StuckRank> stuck_ranks;
  const auto units = table().units_of(process_set, name);
  const auto& ranks = table().sets().info(process_set).ranks;
  const auto& domain = parts_.topology.domain_ranks;
  for (std::size_t index = 0; index < domain.size(); ++index) {
    if (!std::binary_search(ranks.begin(), ranks.end(), domain[index])) continue;
    const auto is_stuck = [&](const Unit* unit) {
      // what is agreed ends without more, once it is cut
      if (unit->queued || board_.rounds().is_promised(unit->id)) return false;
      return board_.rounds().is_stuck(unit->id, static_cast<int>(index),
                                      unit->scope == Scope::World && unit->undecided);
    };
    const auto stuck = std::find_if(units.begin(), units.end(), is_stuck);
    if (stuck == units.end()) return {};
    stuck_ranks.push_back({domain[index], (*stuck)->key.kind});
  }
  return stuck_ranks;
}

/// Returns false, and nothing has happened, if a rank must read more of the log first: it needs the
/// slots' words until it has read the last cut.
bool Controller::try_to_void(Transaction& log, int process_set, const std::string& name,
                             const std::vector<StuckRank>& stuck_ranks) {
  auto units = table().units_of(process_set, name);
  std::erase_if(units, [&](const Unit* unit) {
    return std::none_of(stuck_ranks.begin(), stuck_ranks.end(),
                        [unit](const StuckRank& stuck) { return stuck.kind == unit->key.kind; });
  });
  // of ranks of other domains alone, and this one has forgotten it, or the set is gone
  if (units.empty() || !table().sets().has(process_set)) return true;
  for (const Unit* unit : units)
    if (unit->cut_at > board_.log().slowest_reader()) return false;
  for (const Unit* unit : units) board_.rounds().void_slot(unit->id, unit->slots);
  log.append(Negotiator::conflict(process_set, name, stuck_ranks));
  return true;
}

void Controller::end_conflict_here(int process_set, const std::string& name) {
  Transaction log(log_, 256 + name.size() + 16 * static_cast<std::size_t>(board_.ranks()));
  if (!table().sets().has(process_set)) return;
  const auto stuck_ranks = stuck_here(process_set, name);
  const auto differs = [&](const StuckRank& stuck_rank) {
    return stuck_rank.kind != stuck_ranks.front().kind;
  };
  if (std::any_of(stuck_ranks.begin(), stuck_ranks.end(), differs))
    static_cast<void>(try_to_void(log, process_set, name, stuck_ranks));  // else the next look does
}

void Controller::end_conflict(int process_set, const std::string& name,
                              const std::vector<StuckRank>& stuck_ranks) {
  ReaderWait readers(log_);
  do {
    Transaction log(log_, 256 + name.size() + 16 * stuck_ranks.size());
    if (try_to_void(log, process_set, name, stuck_ranks)) return;
  } while (readers.nudge());
}

std::vector<int> Controller::missing_here(const UnitKey& key) const {
  const auto* const ranks = table().sets().ranks_unless_removed(key.process_set);
  const Unit* const unit = table().find(key);
  if (ranks == nullptr || (unit != nullptr && (unit->undecided || unit->queued))) return {};
  const auto& joined = table().sets().joined(key.process_set);
  const auto& domain = parts_.topology.domain_ranks;
  std::vector<int> missing;
  for (std::size_t index = 0; index < domain.size(); ++index) {
    const bool takes_part = std::binary_search(ranks->begin(), ranks->end(), domain[index]);
    const bool is_excused =
        key.kind != OpKind::Join && std::binary_search(joined.begin(), joined.end(), domain[index]);
    if (!takes_part || is_excused) continue;
    if (unit == nullptr || !board_.rounds().has_arrived(unit->id, static_cast<int>(index)))
      missing.push_back(domain[index]);
  }
  return missing;
}

}  // namespace hvd
