// Small operations that come back (hvd/engine/fast_path.h).
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

constexpr std::uint64_t kByFastPath = std::uint64_t{1}
                                      << 60;  // of a Barrier's, which has no block: the rank has a persistent operation for it
constexpr int kFastYields = 20;               // 4 ranks on 2 cores, 4 B: 8 us instead of 22 with sleeping at once
constexpr auto kFastYieldTime = 50us;         // a yield that takes longer gave the core to somebody else's work

}  // namespace

void Engine::make_persistent(const Entry& entry) noexcept {
  try {
    const auto kind = entry.key.kind;
    const bool has_block = entry.backends.size() == 1 && entry.signature.tensors.size() == 1;
    if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Alltoall || kind == OpKind::Control) return;
    if (negotiator_.scope_of(entry.key.process_set) != Scope::Domain || !negotiator_.knows(entry.unit)) return;
    const Unit& unit = negotiator_.unit(entry.unit);
    const auto& set = negotiator_.process_set(entry.key.process_set);
    auto op = std::make_shared<PersistentOp>();
    op->process_set = entry.key.process_set;
    op->unit = unit.id;
    op->generation = unit.generation;
    op->signature = unit.signatures.of(static_cast<std::size_t>(set.rank));
    if (!(unit.key == entry.key) || !op->signature || !(*op->signature == entry.signature)) return;
    const auto known = persistent_ops_.find(entry.key.process_set, kind, entry.key.name);
    if (known && known->unit == op->unit && known->generation == op->generation && known->signature == op->signature) return;
    const std::size_t ranks = set.ranks.size();
    if (has_block) {
      const TensorSignature& tensor = entry.signature.tensors.front();
      op->backend = entry.backends.front();
      op->traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, set);
      op->count = element_count(tensor.shape);
      op->input_bytes = op->result_bytes = static_cast<std::size_t>(op->count) * element_bytes(tensor.dtype);
      if (kind == OpKind::Allgather) {
        op->result_bytes *= ranks;
        op->result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
      }
      if (static_cast<std::int64_t>(op->result_bytes) > kSmallCallBytes) return;
      if (kind == OpKind::Reducescatter) {
        const std::int64_t rows = tensor.shape.front();
        const std::size_t row = rows == 0 ? 0 : op->input_bytes / static_cast<std::size_t>(rows);
        const auto place = static_cast<std::size_t>(set.rank);
        for (std::size_t before = 0; before < place; ++before)
          op->result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
        op->result_rows = scattered_rows(rows, ranks, place);
        op->result_bytes = static_cast<std::size_t>(op->result_rows) * row;
      }
      // PersistentOps of names that did not come back make room for this one.
      while (persistent_ops_.size() >= board_.slots()) {
        const auto* stale = persistent_ops_.find_if([&](const PersistentOp& other) {
          return !other.place.entry.empty() && !other.in_use.load() &&
                 (!negotiator_.knows(other.unit) || negotiator_.unit(other.unit).generation != other.generation);
        });
        if (stale == nullptr) return;
        drop_persistent(UnitKey(*stale));
      }
      drop_persistent(entry.key);
      const auto location = op->backend->keep(op->traits, std::max<std::size_t>({op->input_bytes, op->result_bytes, 1}));
      if (!location) return;
      op->location = *location;
    }
    auto fresh = std::make_unique<Entry>();
    fresh->key = entry.key;
    fresh->signature = entry.signature;
    fresh->backends = entry.backends;
    fresh->op = op.get();
    fresh->submission.kind = kind;
    fresh->submission.name = entry.submission.name;
    fresh->submission.process_set = entry.key.process_set;
    fresh->submission.op = entry.submission.op;
    fresh->submission.prescale_factor = entry.submission.prescale_factor;
    fresh->submission.postscale_factor = entry.submission.postscale_factor;
    fresh->submission.root = entry.submission.root;
    fresh->submission.device = entry.submission.device;
    fresh->submission.tensors = entry.submission.tensors;
    fresh->submission.allocate = [raw = op.get()](std::size_t /*index*/, std::int64_t rows) -> void* {
      return raw->allocate != nullptr ? raw->allocate(raw->context, rows) : nullptr;
    };
    if (!has_block) op->location = kByFastPath;
    fresh->locations.assign(has_block ? 1 : 0, op->location);
    fresh->prepared.assign(has_block ? 1 : 0, true);
    op->pending = fresh->pending;
    // By way of the ledger, for its nodes. The entry that has just ended is out of it.
    Entry& placed = ledger_.admit(std::move(fresh));
    ledger_.bind(placed, unit.id);
    op->place = ledger_.take_out(placed);
    persistent_ops_.add(entry.key, std::move(op));
  } catch (...) {
    log(LogLevel::Debug, "no persistent operation for '{}': {}", display_name(entry.key.name), status_of_current_exception().text());
  }
}

void Engine::drop_persistent(const UnitKey& key) noexcept {
  if (const auto op = persistent_ops_.remove(key); op && op->backend != nullptr) op->backend->drop(op->location);
}

std::size_t Engine::drop_persistent_for_test() {
  const std::lock_guard lock(mutex_);
  const std::size_t count = persistent_ops_.size();
  while (const auto* key = persistent_ops_.find_if([](const PersistentOp&) { return true; })) drop_persistent(UnitKey(*key));
  return count;
}

bool Engine::take_persistent(PersistentOp& op, const SmallCall& call, Entry*& taken) {
  const auto& set = negotiator_.process_set(call.process_set);
  if (!op.fits(call) || !negotiator_.joined(call.process_set).empty() || !negotiator_.knows(op.unit)) return false;
  const Unit& unit = negotiator_.unit(op.unit);
  if (unit.generation != op.generation || unit.signatures.of(static_cast<std::size_t>(set.rank)) != op.signature) return false;
  if (op.backend != nullptr && !op.backend->is_free(op.location)) return false;
  if (!ledger_.put_back(op.place)) return false;
  Entry& entry = *ledger_.find(op.unit);
  entry.state = EntryState::Waiting;
  entry.announced = false;
  entry.unfinished = 0;
  entry.prepared.assign(entry.prepared.size(), true);
  entry.rows.clear();
  entry.before.clear();
  entry.since = entry.reported = Clock::now();
  op.allocate = call.allocate;
  op.context = call.context;
  if (!entry.submission.tensors.empty()) {
    entry.submission.tensors.front().input = call.input;
    entry.submission.tensors.front().output = call.output;
  }
  HandleState& pending = *op.pending;
  pending.done.store(false, std::memory_order_relaxed);
  pending.waited_for.store(true, std::memory_order_relaxed);
  pending.status = {};
  if (op.input_bytes > 0 && (call.kind != OpKind::Broadcast || call.root == parts_.topology.rank))
    std::memcpy(op.backend->kept(op.location), call.input, op.input_bytes);
  taken = &entry;
  return true;
}

bool Engine::try_fast_path(const SmallCall& call) {
  std::shared_ptr<PersistentOp> op;
  bool for_all = false;
  {
    const std::lock_guard lock(mutex_);
    if (!over_.ok() || stopping_ || board_.failed() || timeline().on() || persistent_ops_.size() == 0)
      return false;  // submit() knows what to say
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
      op = persistent_ops_.find(call.process_set, call.kind, name);
      if (!op || !negotiator_.has_process_set(call.process_set) || op->in_use.exchange(true)) return false;
      if (!take_persistent(*op, call, entry)) {
        op->in_use.store(false);
        return false;
      }
      board_.set_location(op->unit, op->location);
      const std::uint32_t arrived = board_.arrive(op->unit, op->generation);
      if (arrived == 0) {  // evicted meanwhile
        op->place = ledger_.take_out(*entry);
        op->in_use.store(false);
        return false;
      }
      if (unnamed != nullptr) ++*unnamed;
      entry->announced = true;
      in_fast_path_.push_back(entry);
      for_all = arrived == negotiator_.local_members(call.process_set) && run_for_all(*op);
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
    const auto is_done = [&] { return board_.has_result(op->unit) || op->pending->done.load(std::memory_order_relaxed); };
    if (own_core) {
      for (int i = 0; i < kSpins && !is_done(); ++i) cpu_relax();
    } else {
      const auto until = Clock::now() + kFastYieldTime;
      for (int i = 0; i < kFastYields && !is_done() && Clock::now() < until; ++i) std::this_thread::yield();
    }
    if (board_.has_result(op->unit)) {
      const std::lock_guard lock(mutex_);
      take_results();
    }
  }
  struct Leaving {
    PersistentOp& op;
    ~Leaving() { op.in_use.store(false); }
  } const leaving{*op};
  wait(*op->pending);
  return true;
}

bool Engine::run_for_all(const PersistentOp& op) {
  const BoardLock lock(board_);
  read_log();
  if (!negotiator_.knows(op.unit) || negotiator_.unit(op.unit).generation != op.generation || !is_complete(op.unit)) return false;
  const Unit& unit = negotiator_.unit(op.unit);
  if (!negotiator_.joined(unit.key.process_set).empty()) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  const Run everybody{0, static_cast<int>(negotiator_.process_set(unit.key.process_set).ranks.size())};
  if (!unit.signatures.all_say(everybody, op.signature)) return false;
  fast_ranks_.clear();
  fast_locations_.clear();
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : negotiator_.process_set(unit.key.process_set).ranks) {
    const auto index = static_cast<int>(std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin());
    fast_ranks_.push_back(index);
    fast_locations_.push_back(board_.coming_location(op.unit, index));
  }
  const bool done = op.backend != nullptr ? op.backend->run_for_all(op.traits, op.count, fast_locations_)
                                          : std::all_of(fast_locations_.begin(), fast_locations_.end(),
                                                        [](auto location) { return location == kByFastPath; });
  if (!done) return false;
  board_.reset_arrivals(op.unit, 1);
  board_.give_results(op.unit, fast_ranks_);
  return true;
}

void Engine::take_results() {
  for (std::size_t i = 0; i < in_fast_path_.size();) {
    Entry& entry = *in_fast_path_[i];
    if (entry.state == EntryState::Waiting && board_.has_result(entry.unit)) {
      take_result(entry);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void Engine::take_result(Entry& entry) {
  const PersistentOp& op = *entry.op;
  board_.take_result(entry.unit);
  const bool is_source = entry.key.kind == OpKind::Broadcast && entry.signature.root == parts_.topology.rank;
  if (op.backend != nullptr && !(is_source && entry.submission.tensors.front().input == entry.submission.tensors.front().output)) {
    void* output = entry.submission.tensors.front().output;
    if (output == nullptr && op.allocate != nullptr) output = op.allocate(op.context, op.result_rows);
    if (op.result_bytes > 0) std::memcpy(output, op.backend->kept(op.location) + op.result_at, op.result_bytes);
  }
  StatsCounters& stats = *parts_.stats;
  stats.add(stats.negotiation_rounds, 1);
  if (op.backend != nullptr) stats.add(stats.batches_run, 1);
  if (reduces(entry.key.kind)) stats.add(stats.bytes_reduced, op.input_bytes);
  entry.state = advance(entry.state, EntryEvent::Agree);
  finish_entry(entry, {});
}

}  // namespace hvd
