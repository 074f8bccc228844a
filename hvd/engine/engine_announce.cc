// Introductions, arrivals and agreements.
#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

std::uint32_t slots_for(const Signature& signature) { return std::max(1U, static_cast<std::uint32_t>(signature.tensors.size())); }

}  // namespace

std::size_t introduction_bytes(const UnitKey& key, const Signature& signature) {
  std::size_t bytes = 128 + key.name.size();
  for (const auto& tensor : signature.tensors) bytes += 32 + (tensor.shape.size() + tensor.splits.size()) * sizeof(std::int64_t);
  return bytes;
}

std::string joined_text(const UnitKey& key, int rank) {
  return formatted("{} '{}': rank {} has joined process set {}: it can submit again when all its ranks have", name_of(key.kind),
                   display_name(key.name), rank, key.process_set);
}

std::string removed_text(const UnitKey& key) {
  return formatted("{} '{}': process set {} was removed", name_of(key.kind), display_name(key.name), key.process_set);
}

void Engine::note_submission(Entry& entry) {
  if (!timeline().on()) return;
  entry.trace = timeline().submitted(entry.submission, display_name(entry.key.name), is_unnamed(entry.key.name),
                                     entry.since.time_since_epoch().count(), entry.copied);
}

bool Engine::announce(Entry& entry) {
  const auto refuse = [&](Status::Code code, std::string text) {
    finish_entry(entry, {code, std::move(text)});
    return true;
  };
  if (!over_.ok()) return refuse(over_.code(), over_.text());
  // From its announcement on the entry is everybody's: reading the log may finish it.
  bool finished = false;
  const int set = entry.key.process_set;
  const int rank = parts_.topology.rank;
  try {
    read_log();
    const auto& joined = negotiator_.joined(set);
    const bool has_joined = std::binary_search(joined.begin(), joined.end(), rank);
    if (has_joined && entry.key.kind != OpKind::Join) return refuse(Status::Code::Joined, joined_text(entry.key, rank));
    if (!has_joined && entry.key.kind == OpKind::Join && negotiator_.has_process_set(set)) join(set);
    while (true) {
      if (!introduce(entry)) return false;
      if (!negotiator_.has_process_set(set)) return refuse(Status::Code::InvalidArgument, removed_text(entry.key));
      const Unit& unit = negotiator_.unit(entry.unit);
      for (std::uint32_t i = 0; i < unit.slots; ++i) board_.set_location(unit.id + i, i < entry.locations.size() ? entry.locations[i] : 0);
      const auto id = unit.id;
      const std::uint32_t arrived = board_.arrive(id, unit.generation);
      if (arrived == 0) continue;  // evicted between the two: introduce it again
      entry.announced = finished = true;
      after_arriving(entry, arrived);
      return true;
    }
  } catch (...) {
    // Records that cannot be read, or a bug: the ranks' tables may differ from here on, so the world ends for all.
    const Status status = status_of_current_exception();
    board_.set_failure(status);
    if (!finished) finish_entry(entry, board_.failure());
    return true;
  }
}

void Engine::after_arriving(Entry& entry, std::uint32_t arrived) {
  const int set = entry.key.process_set;
  const auto id = entry.unit;
  if (arrived == negotiator_.local_members(set)) {
    agree(id);
    if (negotiator_.any_left()) doubt(id);
    return;
  }
  // A rank that has joined meanwhile may have looked here before this one arrived: either it has seen the arrival, or this rank
  // sees its record: arrivals and the log's tail are sequentially consistent.
  read_log();
  if (!negotiator_.joined(set).empty() && is_complete(id)) return agree(id);
  if (negotiator_.any_left()) doubt(id);
}

bool Engine::introduce(Entry& entry) {
  const int rank = parts_.topology.rank;
  const auto slots = slots_for(entry.signature);
  read_log();
  if (!negotiator_.has_process_set(entry.key.process_set)) return true;
  const Unit* unit = negotiator_.find(entry.key);
  if (unit == nullptr || unit->slots < slots || !negotiator_.introduced(*unit, rank, entry.signature)) {
    Room room = Room::Now;
    with_log(introduction_bytes(entry.key, entry.signature), [&] {
      if (!negotiator_.has_process_set(entry.key.process_set)) return;
      room = make_room_for(entry.key, slots);
      if (room != Room::Now) return;
      commit(*negotiator_.introduction(entry.key, rank, entry.signature, [this](std::uint32_t slot) { return board_.generation(slot); }));
    });
    if (room == Room::None)
      throw BackendError(formatted("more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
    if (room != Room::Now) return false;
    unit = negotiator_.find(entry.key);
    entry.repeats = false;
  }
  if (unit != nullptr) ledger_.bind(entry, unit->id);
  return true;
}

void Engine::introduce_remote(const UnitKey& key, Runs ranks, const Signature& signature) {
  for (const int rank : parts_.topology.domain_ranks) remove(ranks, {rank, 1});  // they have spoken for themselves
  if (ranks.empty()) return;
  for (Room room = Room::AfterReading; room == Room::AfterReading;) {
    with_log(introduction_bytes(key, signature) + ranks.size() * sizeof(Run), [&] {
      room = Room::Now;
      if (!negotiator_.has_process_set(key.process_set)) return;
      const Unit* unit = negotiator_.find(key);
      if (unit != nullptr && negotiator_.introduced(*unit, ranks, signature)) return;
      // Without room it is told again when this domain needs it: when a rank here introduces it, or when it is agreed.
      if (unit == nullptr) room = make_room(slots_for(signature));
      if (room == Room::Now)
        commit(*negotiator_.introduction(key, ranks, signature, [this](std::uint32_t slot) { return board_.generation(slot); }));
    });
    if (room != Room::AfterReading) return;  // done, or it is told again later
    nudge_readers();
    if (board_.failed()) throw BackendError("the world has failed");
  }
}

void Engine::agree_by_root(const UnitKey& key, const Agreement& what) {
  // All domains keep the same queue, also of what none of their ranks takes part in, and which they may have forgotten.
  // Or have forgotten in the middle of the ranks' introductions, and learnt anew from the rest of them.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    bool done = false;
    with_log(64 + what.present.size() / 8 + what.absent.size() * sizeof(int), [&] {
      const Unit* unit = negotiator_.find(key);
      done = !negotiator_.has_process_set(key.process_set);
      if (done || unit == nullptr) return;
      done = negotiator_.has_introduced_all(*unit, what.absent) || i + 1 == kTries;
      if (done) commit(Negotiator::agreement(unit->id, what));
    });
    if (done) return;
    leader_tree_->retell(key);
  }
  throw BackendError(formatted("more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
}

bool Engine::evictable(std::uint32_t id) const {
  // Its slots may be given to another tensor once nobody has arrived, its last batch is cut, and every rank has read that record and
  // with it the locations. What other domains have said of it the relay remembers.
  const Unit& unit = negotiator_.unit(id);
  return !unit.undecided && board_.arrivals(id) == 0 && unit.cut_at <= board_.slowest_reader() && board_.are_results_taken(id);
}

Engine::Room Engine::make_room_for(const UnitKey& key, std::uint32_t slots) {
  const Unit* unit = negotiator_.find(key);
  if (unit == nullptr) return make_room(slots);
  // A name that comes back with more tensors moves. Where a rank has arrived with fewer, or its domain is ready, the ranks disagree, and
  // that can be said without slots.
  const bool settled = board_.arrivals(unit->id) == 0 && (!unit->undecided || unit->queued);
  if (unit->slots >= slots || !settled) return Room::Now;
  if (unit->queued) return Room::AfterCutting;
  if (!evictable(unit->id)) return board_.arrivals(unit->id) > 0 ? Room::Now : Room::AfterReading;
  if (!board_.evict(unit->id)) return Room::Now;
  commit(Negotiator::eviction(unit->id));
  return make_room(slots);
}

Engine::Room Engine::make_room(std::uint32_t slots) {
  while (!negotiator_.has_free_slots(slots)) {
    if (const auto id = negotiator_.oldest([this](std::uint32_t candidate) { return evictable(candidate); })) {
      if (board_.evict(*id)) commit(Negotiator::eviction(*id));
      continue;
    }
    const auto unread = [this](std::uint32_t id) { return !negotiator_.unit(id).undecided && board_.arrivals(id) == 0; };
    const auto uncut = [this](std::uint32_t id) { return negotiator_.unit(id).queued && board_.arrivals(id) == 0; };
    return negotiator_.oldest(unread) ? Room::AfterReading : negotiator_.oldest(uncut) ? Room::AfterCutting : Room::None;
  }
  return Room::Now;
}

bool Engine::drop_unit(const UnitKey& key) {
  bool dropped = true;
  with_log(64, [&] {
    const Unit* unit = negotiator_.find(key);
    if (unit == nullptr) return;
    const std::uint32_t id = unit->id;
    dropped = evictable(id) && board_.evict(id);
    if (dropped) commit(Negotiator::eviction(id));
  });
  return dropped;
}

void Engine::bury_removed_sets() {
  negotiator_.bury_removed([this](int id) {
    bool used = has_later(id);
    ledger_.for_each([&](const Entry& entry) { used = used || entry.key.process_set == id; });
    for (const auto& batch : to_launch_) used = used || batch.cut.plan.process_set == id;
    for (const auto& running : running_) used = used || running.batch.cut.plan.process_set == id;
    return used;
  });
}

std::size_t Engine::tensors_kept_for_test() const {
  const std::lock_guard lock(mutex_);
  return std::max(negotiator_.units_kept(), leader_tree_ ? leader_tree_->tensors_kept() : 0);
}

std::size_t Engine::sets_kept_for_test() const {
  const std::lock_guard lock(mutex_);
  return negotiator_.sets_kept() + joins_.size() + unnamed_.size() + (leader_tree_ ? leader_tree_->sets_and_names_kept() : 0);
}

void Engine::nudge_readers() {
  board_.ring_all_workers();
  board_.ring_waiters();
  if (const auto dead = board_.find_dead())
    board_.set_failure({Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()",
                                                            parts_.topology.domain_ranks[static_cast<std::size_t>(*dead)])});
  std::this_thread::sleep_for(50us);
}

std::vector<int> Engine::absent_from(const Unit& unit) const {
  std::vector<int> absent;
  if (unit.key.kind == OpKind::Join) return absent;
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : negotiator_.joined(unit.key.process_set)) {
    const auto place = std::lower_bound(domain.begin(), domain.end(), rank);
    if (place == domain.end() || *place != rank) continue;
    if (!board_.has_arrived(unit.id, static_cast<int>(place - domain.begin()))) absent.push_back(rank);
  }
  return absent;
}

bool Engine::is_complete(std::uint32_t id) const {
  if (!negotiator_.knows(id)) return false;
  const Unit& unit = negotiator_.unit(id);
  const std::uint32_t arrived = board_.arrivals(id);
  return arrived > 0 && arrived + absent_from(unit).size() == negotiator_.local_members(unit.key.process_set);
}

bool Engine::have_read(const std::vector<int>& ranks, std::uint64_t position) const {
  const auto& domain = parts_.topology.domain_ranks;
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto place = std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin();
    return board_.read_position(static_cast<int>(place)) >= position;
  });
}

void Engine::agree(std::uint32_t id) {
  bool said = false;
  bool world = false;
  bool unread = true;
  const auto& all = negotiator_.process_set(negotiator_.unit(id).key.process_set).ranks;
  const std::size_t bytes = negotiator_.unit(id).slots / 8 + 4 * all.size() + 128;
  const auto say = [&] {
    unread = false;
    // Two may find a unit complete, where ranks have joined; the first to come says so.
    if (!is_complete(id)) return;
    const Unit& unit = negotiator_.unit(id);
    const auto& set = negotiator_.process_set(unit.key.process_set);
    Agreement what;
    what.present.assign(unit.slots, false);
    what.absent = absent_from(unit);
    // One that has joined does not hold up a new round by arriving late. Before the slot's words are written anew it must have read the
    // cut of the last round, in which it may have taken part.
    unread = !have_read(what.absent, unit.cut_at);
    if (unread) return;
    // Not the rank that says so: it may have been overtaken between its joining and its arriving here.
    what.last = unit.key.kind == OpKind::Join ? negotiator_.last_joined(unit.key.process_set) : parts_.topology.rank;
    const auto& domain = parts_.topology.domain_ranks;
    for (std::size_t index = 0; index < domain.size(); ++index) {
      if (!std::binary_search(set.ranks.begin(), set.ranks.end(), domain[index])) continue;
      if (std::binary_search(what.absent.begin(), what.absent.end(), domain[index])) continue;
      for (std::uint32_t i = 0; i < unit.slots; ++i)
        if ((board_.coming_location(id + i, static_cast<int>(index)) & kAbsent) == 0) what.present[i] = true;
    }
    world = unit.scope == Scope::World;
    said = true;
    // Before the record: whoever reads it may arrive at the slot again at once.
    board_.reset_arrivals(id, unit.slots);
    commit(world ? Negotiator::host_readiness(id, what) : Negotiator::agreement(id, what));
    if (!world) cut_if_idle();
  };
  while (unread) {
    with_log(bytes, say);
    if (unread) nudge_readers();
    if (unread && board_.failed()) return;
  }
  if (said && world) board_.ring_worker(0);  // the leader has something to pass on
}

void Engine::join(int process_set) {
  const int rank = parts_.topology.rank;
  with_log(64, [&] { commit(Negotiator::joining(process_set, rank)); });
  std::vector<std::uint32_t> complete;
  for (const Unit* unit : negotiator_.units_of(process_set))
    if (is_complete(unit->id)) complete.push_back(unit->id);
  for (const auto id : complete)
    if (negotiator_.knows(id)) agree(id);
  with_log(64, [&] { commit(Negotiator::joined_up(process_set, rank)); });
}

}  // namespace hvd
