// Small operations that come back (hvd/engine/fast_path.h).
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

constexpr std::uint64_t kByLane = std::uint64_t{1} << 60;  // of a Barrier's, which has no block: the rank has a lane for it
constexpr int kLaneYields = 20;                            // 4 ranks on 2 cores, 4 B: 8 us instead of 22 with sleeping at once
constexpr auto kLaneYieldTime = 50us;                      // a yield that takes longer gave the core to somebody else's work

}  // namespace

void Engine::make_lane(const Entry& entry) noexcept {
  try {
    const auto kind = entry.key.kind;
    const bool has_block = entry.backends.size() == 1 && entry.signature.tensors.size() == 1;
    if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Alltoall || kind == OpKind::Control) return;
    if (negotiator_.scope_of(entry.key.process_set) != Scope::Domain || !negotiator_.knows(entry.unit)) return;
    const Unit& unit = negotiator_.unit(entry.unit);
    const auto& set = negotiator_.process_set(entry.key.process_set);
    auto lane = std::make_shared<Lane>();
    lane->unit = unit.id;
    lane->generation = unit.generation;
    lane->signature = unit.signatures[static_cast<std::size_t>(set.rank)];
    if (!(unit.key == entry.key) || !lane->signature || !(*lane->signature == entry.signature)) return;
    const auto known = lanes_.find(entry.key.process_set, kind, entry.key.name);
    if (known && known->unit == lane->unit && known->generation == lane->generation && known->signature == lane->signature) return;
    const std::size_t ranks = set.ranks.size();
    if (has_block) {
      const TensorSignature& tensor = entry.signature.tensors.front();
      lane->backend = entry.backends.front();
      lane->traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, set);
      lane->count = element_count(tensor.shape);
      lane->input_bytes = lane->result_bytes = static_cast<std::size_t>(lane->count) * element_bytes(tensor.dtype);
      if (kind == OpKind::Allgather) {
        lane->result_bytes *= ranks;
        lane->result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
      }
      if (static_cast<std::int64_t>(lane->result_bytes) > kLaneBytes) return;
      if (kind == OpKind::Reducescatter) {
        const std::int64_t rows = tensor.shape.front();
        const std::size_t row = rows == 0 ? 0 : lane->input_bytes / static_cast<std::size_t>(rows);
        const auto place = static_cast<std::size_t>(set.rank);
        for (std::size_t before = 0; before < place; ++before)
          lane->result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
        lane->result_rows = scattered_rows(rows, ranks, place);
        lane->result_bytes = static_cast<std::size_t>(lane->result_rows) * row;
      }
      // Lanes of names that did not come back make room for this one.
      while (lanes_.size() >= board_.slots()) {
        const auto* stale = lanes_.find_if([&](const Lane& other) {
          return !other.place.entry.empty() && !other.in_use.load() &&
                 (!negotiator_.knows(other.unit) || negotiator_.unit(other.unit).generation != other.generation);
        });
        if (stale == nullptr) return;
        drop_lane(UnitKey(*stale));
      }
      drop_lane(entry.key);
      const auto location = lane->backend->keep(lane->traits, std::max<std::size_t>({lane->input_bytes, lane->result_bytes, 1}));
      if (!location) return;
      lane->location = *location;
    }
    auto fresh = std::make_unique<Entry>();
    fresh->key = entry.key;
    fresh->signature = entry.signature;
    fresh->backends = entry.backends;
    fresh->lane = lane.get();
    fresh->submission.kind = kind;
    fresh->submission.name = entry.submission.name;
    fresh->submission.process_set = entry.key.process_set;
    fresh->submission.op = entry.submission.op;
    fresh->submission.prescale_factor = entry.submission.prescale_factor;
    fresh->submission.postscale_factor = entry.submission.postscale_factor;
    fresh->submission.root = entry.submission.root;
    fresh->submission.device = entry.submission.device;
    fresh->submission.tensors = entry.submission.tensors;
    fresh->submission.allocate = [raw = lane.get()](std::size_t /*index*/, std::int64_t rows) -> void* {
      return raw->allocate != nullptr ? raw->allocate(raw->context, rows) : nullptr;
    };
    if (!has_block) lane->location = kByLane;
    fresh->locations.assign(has_block ? 1 : 0, lane->location);
    fresh->prepared.assign(has_block ? 1 : 0, true);
    lane->pending = fresh->pending;
    // By way of the ledger, for its nodes. The entry that has just ended is out of it.
    Entry& placed = ledger_.admit(std::move(fresh));
    ledger_.bind(placed, unit.id);
    lane->place = ledger_.take_out(placed);
    lanes_.add(entry.key, std::move(lane));
  } catch (...) {
    log(LogLevel::Debug, "no lane for '{}': {}", display_name(entry.key.name), status_of_current_exception().text());
  }
}

void Engine::drop_lane(const UnitKey& key) noexcept {
  if (const auto lane = lanes_.remove(key); lane && lane->backend != nullptr) lane->backend->drop(lane->location);
}

std::size_t Engine::drop_lanes_for_test() {
  const std::lock_guard lock(mutex_);
  const std::size_t count = lanes_.size();
  while (const auto* key = lanes_.find_if([](const Lane&) { return true; })) drop_lane(UnitKey(*key));
  return count;
}

bool Engine::take_lane(Lane& lane, const Immediate& call, Entry*& taken) {
  const auto& set = negotiator_.process_set(call.process_set);
  if (!lane.fits(call) || !negotiator_.joined(call.process_set).empty() || !negotiator_.knows(lane.unit)) return false;
  const Unit& unit = negotiator_.unit(lane.unit);
  if (unit.generation != lane.generation || unit.signatures[static_cast<std::size_t>(set.rank)] != lane.signature) return false;
  if (lane.backend != nullptr && !lane.backend->is_free(lane.location)) return false;
  if (!ledger_.put_back(lane.place)) return false;
  Entry& entry = *ledger_.find(lane.unit);
  entry.state = EntryState::Waiting;
  entry.announced = false;
  entry.unfinished = 0;
  entry.prepared.assign(entry.prepared.size(), true);
  entry.rows.clear();
  entry.before.clear();
  entry.since = entry.reported = Clock::now();
  lane.allocate = call.allocate;
  lane.context = call.context;
  if (!entry.submission.tensors.empty()) {
    entry.submission.tensors.front().input = call.input;
    entry.submission.tensors.front().output = call.output;
  }
  Pending& pending = *lane.pending;
  pending.done.store(false, std::memory_order_relaxed);
  pending.waited_for.store(true, std::memory_order_relaxed);
  pending.status = {};
  if (lane.input_bytes > 0 && (call.kind != OpKind::Broadcast || call.root == parts_.topology.rank))
    std::memcpy(lane.backend->kept(lane.location), call.input, lane.input_bytes);
  taken = &entry;
  return true;
}

bool Engine::run_immediately(const Immediate& call) {
  std::shared_ptr<Lane> lane;
  bool for_all = false;
  {
    const std::lock_guard lock(mutex_);
    if (!over_.ok() || stopping_ || board_.failed() || timeline().on() || lanes_.size() == 0) return false;  // submit() knows what to say
    Entry* entry = nullptr;
    try {
      read_log();
      std::string_view name = call.name;
      std::array<char, kUnnamedText> text{};
      std::uint64_t* unnamed = nullptr;
      if (name.empty()) {
        if (!later_.empty()) return false;
        unnamed = &unnamed_[{call.process_set, call.kind}];
        name = made_up_name(call.process_set, call.kind, *unnamed, text);
      }
      lane = lanes_.find(call.process_set, call.kind, name);
      if (!lane || lane->in_use.exchange(true)) return false;
      if (!take_lane(*lane, call, entry)) {
        lane->in_use.store(false);
        return false;
      }
      board_.set_location(lane->unit, lane->location);
      const std::uint32_t arrived = board_.arrive(lane->unit, lane->generation);
      if (arrived == 0) {  // evicted meanwhile
        lane->place = ledger_.take_out(*entry);
        lane->in_use.store(false);
        return false;
      }
      if (unnamed != nullptr) ++*unnamed;
      entry->announced = true;
      in_lanes_.push_back(entry);
      for_all = arrived == negotiator_.local_members(call.process_set) && run_for_all(*lane);
      if (for_all) {
        take_result(*entry);
      } else {
        after_arriving(*entry, arrived);
      }
    } catch (...) {
      board_.set_failure(status_of_current_exception());
      if (entry == nullptr) return false;
      if (!entry->announced) finish_entry(*entry, board_.failure());
    }
  }
  if (for_all) board_.ring_waiters();
  parts_.stats->add(parts_.stats->tensors_submitted, call.kind == OpKind::Barrier ? 0 : 1);
  if (!for_all) {
    // Where ranks share cores, the one awaited may be the next to run here.
    const bool own_core = static_cast<unsigned>(board_.ranks()) <= parts_.cores;
    const auto is_done = [&] { return board_.has_result(lane->unit) || lane->pending->done.load(std::memory_order_relaxed); };
    if (own_core) {
      for (int i = 0; i < kSpins && !is_done(); ++i) cpu_relax();
    } else {
      const auto until = Clock::now() + kLaneYieldTime;
      for (int i = 0; i < kLaneYields && !is_done() && Clock::now() < until; ++i) std::this_thread::yield();
    }
    if (board_.has_result(lane->unit)) {
      const std::lock_guard lock(mutex_);
      take_results();
    }
  }
  struct Leaving {
    Lane& lane;
    ~Leaving() { lane.in_use.store(false); }
  } const leaving{*lane};
  wait(*lane->pending);
  return true;
}

bool Engine::run_for_all(const Lane& lane) {
  const BoardLock lock(board_);
  read_log();
  if (!negotiator_.knows(lane.unit) || negotiator_.unit(lane.unit).generation != lane.generation || !is_complete(lane.unit)) return false;
  const Unit& unit = negotiator_.unit(lane.unit);
  if (!negotiator_.joined(unit.key.process_set).empty()) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  for (const auto& signature : unit.signatures)
    if (signature != lane.signature) return false;
  lane_ranks_.clear();
  lane_locations_.clear();
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : negotiator_.process_set(unit.key.process_set).ranks) {
    const auto index = static_cast<int>(std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin());
    lane_ranks_.push_back(index);
    lane_locations_.push_back(board_.coming_location(lane.unit, index));
  }
  const bool done = lane.backend != nullptr
                        ? lane.backend->run_for_all(lane.traits, lane.count, lane_locations_)
                        : std::all_of(lane_locations_.begin(), lane_locations_.end(), [](auto location) { return location == kByLane; });
  if (!done) return false;
  board_.reset_arrivals(lane.unit, 1);
  board_.give_results(lane.unit, lane_ranks_);
  return true;
}

void Engine::take_results() {
  for (std::size_t i = 0; i < in_lanes_.size();) {
    Entry& entry = *in_lanes_[i];
    if (entry.state == EntryState::Waiting && board_.has_result(entry.unit)) {
      take_result(entry);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void Engine::take_result(Entry& entry) {
  const Lane& lane = *entry.lane;
  board_.take_result(entry.unit);
  const bool is_source = entry.key.kind == OpKind::Broadcast && entry.signature.root == parts_.topology.rank;
  if (lane.backend != nullptr && !(is_source && entry.submission.tensors.front().input == entry.submission.tensors.front().output)) {
    void* output = entry.submission.tensors.front().output;
    if (output == nullptr && lane.allocate != nullptr) output = lane.allocate(lane.context, lane.result_rows);
    if (lane.result_bytes > 0) std::memcpy(output, lane.backend->kept(lane.location) + lane.result_at, lane.result_bytes);
  }
  StatsCounters& stats = *parts_.stats;
  stats.add(stats.negotiation_rounds, 1);
  if (lane.backend != nullptr) stats.add(stats.batches_run, 1);
  if (reduces(entry.key.kind)) stats.add(stats.bytes_reduced, lane.input_bytes);
  entry.state = advance(entry.state, EntryEvent::Agree);
  finish_entry(entry, {});
}

}  // namespace hvd
