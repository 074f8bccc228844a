#include "hvd/engine/fast_path.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hvd/base/log.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kNoBlock = std::uint64_t{1} << 60;  // where a Barrier, which has no block, says that the rank takes the fast path
constexpr int kYields = 20;                                 // 4 ranks on 2 cores, 4 B: 8 us instead of 22 with sleeping at once
constexpr auto kYieldTime = 50us;                           // a yield that takes longer gave the core to somebody else's work

}  // namespace

FastPath::FastPath(const EngineParts& parts, NegotiationLog& log, Controller& controller, Ledger& ledger, SubmissionQueue& queue,
                   EngineMutex& mutex, EngineEvents& engine)
    : parts_(parts),
      log_(log),
      controller_(controller),
      ledger_(ledger),
      queue_(queue),
      mutex_(mutex),
      engine_(engine),
      board_(*parts.board) {
  arrived_.reserve(SubmissionQueue::kUnnamedNames);
  indices_.reserve(static_cast<std::size_t>(board_.ranks()));
  locations_.reserve(static_cast<std::size_t>(board_.ranks()));
}

// -------------------------------------------------------------------------------------------------------- making and dropping

/// Returns all of the operation but its entry and its block; null if the entry is not worth one, or has one.
std::shared_ptr<PersistentOp> FastPath::describe(const Entry& entry) const {
  const auto kind = entry.key.kind;
  const bool has_block = entry.backends.size() == 1 && entry.signature.tensors.size() == 1;
  if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Alltoall || kind == OpKind::Control) return nullptr;
  if (table().scope_of(entry.key.process_set) != Scope::Domain || !table().knows(entry.unit.id)) return nullptr;
  const Unit& unit = table().unit(entry.unit.id);
  const auto& set = table().process_set(entry.key.process_set);
  auto op = std::make_shared<PersistentOp>();
  op->unit = unit.ref();
  op->signature = unit.signatures[static_cast<std::size_t>(set.rank)];
  if (!(unit.key == entry.key) || !op->signature || !(*op->signature == entry.signature)) return nullptr;
  const auto known = ops_.find(entry.key.process_set, kind, entry.key.name);
  if (known && known->unit == op->unit && known->signature == op->signature) return nullptr;
  if (!has_block) {
    op->location = kNoBlock;
    return op;
  }
  const std::size_t ranks = set.ranks.size();
  const TensorSignature& tensor = entry.signature.tensors.front();
  op->memory = entry.backends.front()->fast_path_memory();
  op->traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, set);
  op->count = element_count(tensor.shape);
  op->input_bytes = op->result_bytes = static_cast<std::size_t>(op->count) * element_bytes(tensor.dtype);
  if (kind == OpKind::Allgather) {
    op->result_bytes *= ranks;
    op->result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
  }
  if (static_cast<std::int64_t>(op->result_bytes) > kSmallCallBytes) return nullptr;
  if (kind == OpKind::Reducescatter) {
    const std::int64_t rows = tensor.shape.front();
    const std::size_t row = rows == 0 ? 0 : op->input_bytes / static_cast<std::size_t>(rows);
    const auto place = static_cast<std::size_t>(set.rank);
    for (std::size_t before = 0; before < place; ++before)
      op->result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
    op->result_rows = scattered_rows(rows, ranks, place);
    op->result_bytes = static_cast<std::size_t>(op->result_rows) * row;
  }
  return op;
}

/// Drops operations of names that did not come back, until there is space for one more. Returns false if there are none of them.
bool FastPath::make_space() {
  while (ops_.size() >= board_.slots()) {
    const auto* stale = ops_.find_if([&](const PersistentOp& other) {
      return !other.place.entry.empty() && !other.in_use.load() &&
             (!table().knows(other.unit.id) || table().unit(other.unit.id).generation != other.unit.generation);
    });
    if (stale == nullptr) return false;
    drop(UnitKey(*stale));
  }
  return true;
}

std::unique_ptr<Entry> FastPath::entry_for(PersistentOp& op, const Entry& like) const {
  auto entry = std::make_unique<Entry>();
  entry->key = like.key;
  entry->signature = like.signature;
  entry->backends = like.backends;
  entry->op = &op;
  entry->submission.kind = like.key.kind;
  entry->submission.name = like.submission.name;
  entry->submission.process_set = like.key.process_set;
  entry->submission.op = like.submission.op;
  entry->submission.prescale_factor = like.submission.prescale_factor;
  entry->submission.postscale_factor = like.submission.postscale_factor;
  entry->submission.root = like.submission.root;
  entry->submission.device = like.submission.device;
  entry->submission.tensors = like.submission.tensors;
  entry->submission.allocate = [raw = &op](std::size_t /*index*/, std::int64_t rows) -> void* {
    return raw->allocate != nullptr ? raw->allocate(raw->context, rows) : nullptr;
  };
  entry->locations.assign(op.memory != nullptr ? 1 : 0, op.location);
  entry->prepared.assign(op.memory != nullptr ? 1 : 0, true);
  return entry;
}

void FastPath::make(const Entry& entry) noexcept {
  try {
    auto op = describe(entry);
    if (!op) return;
    if (op->location != kNoBlock) {
      if (!make_space()) return;
      drop(entry.key);
      if (op->memory == nullptr) return;
      const auto location = op->memory->keep(op->traits, std::max<std::size_t>({op->input_bytes, op->result_bytes, 1}));
      if (!location) return;
      op->location = *location;
    }
    auto fresh = entry_for(*op, entry);
    op->pending = fresh->pending;
    // By way of the ledger, for its nodes. The entry that has just ended is out of it.
    Entry& placed = ledger_.admit(std::move(fresh));
    ledger_.bind(placed, op->unit);
    op->place = ledger_.take_out(placed);
    ops_.add(entry.key, std::move(op));
  } catch (...) {
    log(LogLevel::Debug, "no persistent operation for '{}': {}", display_name(entry.key.name), status_of_current_exception().text());
  }
}

void FastPath::drop(const UnitKey& key) noexcept {
  if (const auto op = ops_.remove(key); op && op->memory != nullptr) op->memory->drop(op->location);
}

std::size_t FastPath::drop_all() {
  const std::size_t count = ops_.size();
  while (const auto* key = ops_.find_if([](const PersistentOp&) { return true; })) drop(UnitKey(*key));
  return count;
}

// --------------------------------------------------------------------------------------------------------------------- running

/// Returns the operation's entry, back in the ledger and filled; null if the operation does not fit the call, or not now.
Entry* FastPath::ready(PersistentOp& op, const SmallCall& call) {
  const auto& set = table().process_set(call.process_set);
  if (!op.fits(call) || !table().joined(call.process_set).empty() || !table().knows(op.unit.id)) return nullptr;
  const Unit& unit = table().unit(op.unit.id);
  if (unit.generation != op.unit.generation || unit.signatures[static_cast<std::size_t>(set.rank)] != op.signature) return nullptr;
  if (op.memory != nullptr && !op.memory->is_free(op.location)) return nullptr;
  if (!ledger_.put_back(op.place)) return nullptr;
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
    std::memcpy(op.memory->kept(op.location), call.input, op.input_bytes);
  return &entry;
}

std::shared_ptr<PersistentOp> FastPath::start(const SmallCall& call) {
  if (ops_.size() == 0) return nullptr;
  std::shared_ptr<PersistentOp> op;
  Entry* entry = nullptr;
  try {
    log_.read();
    std::string_view name = call.name;
    std::array<char, kUnnamedText> text{};
    if (name.empty()) {
      if (!queue_.empty()) return nullptr;
      name = queue_.next_name(call.process_set, call.kind, text);
    }
    op = ops_.find(call.process_set, call.kind, name);
    if (!op || op->in_use.exchange(true)) return nullptr;
    entry = ready(*op, call);
    if (entry == nullptr || !arrive(*op, *entry)) {
      op->in_use.store(false);
      return nullptr;
    }
    if (call.name.empty()) queue_.use_name(call.process_set, call.kind);
  } catch (...) {
    board_.set_failure(status_of_current_exception());
    if (entry == nullptr) return nullptr;
    if (!entry->announced) engine_.finish(*entry, board_.failure());
  }
  parts_.stats->add(parts_.stats->tensors_submitted, call.kind == OpKind::Barrier ? 0 : 1);
  return op;
}

/// Returns false if the unit was evicted meanwhile; the entry is out of the ledger again then.
bool FastPath::arrive(PersistentOp& op, Entry& entry) {
  board_.set_location(op.unit.id, op.location);
  const std::uint32_t arrived = board_.arrive(op.unit.id, op.unit.generation);
  if (arrived == 0) {
    op.place = ledger_.take_out(entry);
    return false;
  }
  entry.announced = true;
  arrived_.push_back(&entry);
  if (arrived == table().local_members(entry.key.process_set) && run_for_all(op)) {
    take_result(entry);
    mutex_.wake_waiters();
  } else {
    engine_.arrived(entry, arrived);
  }
  return true;
}

void FastPath::await(const PersistentOp& op) const {
  const auto is_done = [&] { return board_.has_result(op.unit.id) || op.pending->done.load(std::memory_order_relaxed); };
  // Where ranks share cores, the one awaited may be the next to run here.
  if (static_cast<unsigned>(board_.ranks()) <= parts_.cores) {
    for (int i = 0; i < kSpins && !is_done(); ++i) cpu_relax();
  } else {
    const auto until = Clock::now() + kYieldTime;
    for (int i = 0; i < kYields && !is_done() && Clock::now() < until; ++i) std::this_thread::yield();
  }
}

bool FastPath::run_for_all(const PersistentOp& op) {
  const BoardLock lock(board_);
  log_.read();
  if (!table().knows(op.unit.id) || table().unit(op.unit.id).generation != op.unit.generation || !controller_.is_complete(op.unit.id))
    return false;
  const Unit& unit = table().unit(op.unit.id);
  if (!table().joined(unit.key.process_set).empty()) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  for (const auto& signature : unit.signatures)
    if (signature != op.signature) return false;
  indices_.clear();
  locations_.clear();
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : table().process_set(unit.key.process_set).ranks) {
    const auto index = static_cast<int>(std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin());
    indices_.push_back(index);
    locations_.push_back(board_.coming_location(op.unit.id, index));
  }
  const bool done = op.memory != nullptr
                        ? op.memory->run_for_all(op.traits, op.count, locations_)
                        : std::all_of(locations_.begin(), locations_.end(), [](auto location) { return location == kNoBlock; });
  if (!done) return false;
  board_.reset_arrivals(op.unit.id, 1);
  board_.give_results(op.unit.id, indices_);
  return true;
}

void FastPath::take_results() {
  for (std::size_t i = 0; i < arrived_.size();) {
    Entry& entry = *arrived_[i];
    if (entry.state == EntryState::Waiting && board_.has_result(entry.unit.id)) {
      take_result(entry);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void FastPath::take_result(Entry& entry) {
  const PersistentOp& op = *entry.op;
  board_.take_result(entry.unit.id);
  const bool is_source = entry.key.kind == OpKind::Broadcast && entry.signature.root == parts_.topology.rank;
  if (op.memory != nullptr && !(is_source && entry.submission.tensors.front().input == entry.submission.tensors.front().output)) {
    void* output = entry.submission.tensors.front().output;
    if (output == nullptr && op.allocate != nullptr) output = op.allocate(op.context, op.result_rows);
    if (op.result_bytes > 0) std::memcpy(output, op.memory->kept(op.location) + op.result_at, op.result_bytes);
  }
  StatsCounters& stats = *parts_.stats;
  stats.add(stats.negotiation_rounds, 1);
  if (op.memory != nullptr) stats.add(stats.batches_run, 1);
  if (reduces(entry.key.kind)) stats.add(stats.bytes_reduced, op.input_bytes);
  entry.state = advance(entry.state, EntryEvent::Agree);
  engine_.finish(entry, {});
}

bool FastPath::end(Entry& entry, bool failed) {
  std::erase(arrived_, &entry);
  if (!failed || !entry.announced || !board_.has_result(entry.unit.id)) return true;
  take_result(entry);  // it was done before that
  return false;
}

}  // namespace hvd
