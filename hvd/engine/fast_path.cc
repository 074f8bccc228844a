#include "hvd/engine/fast_path.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "hvd/base/log.h"

namespace hvd {

namespace {

/// Whether all tensors of the operation may lie in one block: there is one, or they are a group that is reduced, of one type.
bool is_one_block(const Entry& entry) {
  const auto& tensors = entry.signature.tensors;
  if (tensors.empty() || entry.backends.size() != tensors.size()) return false;
  return tensors.size() == 1 || (entry.key.kind == OpKind::Allreduce &&
                                 std::ranges::all_of(tensors, [&](const auto& tensor) { return tensor.dtype == tensors.front().dtype; }));
}

constexpr std::uint64_t kNoBlock = std::uint64_t{1} << 60;  // where a Barrier, which has no block, says that the rank takes the fast path

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
      board_(*parts.board),
      short_wait_(parts.has_core()) {
  arrived_.reserve(SubmissionQueue::kUnnamedNames);
  blocks_.reserve(static_cast<std::size_t>(board_.ranks()));
}

// -------------------------------------------------------------------------------------------------------- making and dropping

/// Whether the leaders of all domains may end the operation's rounds among themselves.
bool FastPath::may_be_direct(const Entry& entry, const ProcessSetInfo& set) const {
  switch (entry.key.kind) {
    case OpKind::Barrier:
      break;
    case OpKind::Allreduce:
    case OpKind::Allgather:
    case OpKind::Broadcast:
      if (entry.backends.empty() || entry.backends.front()->direct_memory() == nullptr) return false;
      break;
    default:
      return false;
  }
  return parts_.topology.domains <= kDirectDomains && set.ranks.size() == static_cast<std::size_t>(parts_.topology.size);
}

/// Returns all of the operation but its entry and its block; null if the entry is not worth one, or has one.
std::shared_ptr<PersistentOp> FastPath::describe(const Entry& entry) const {
  const auto kind = entry.key.kind;
  const bool has_block = is_one_block(entry);
  if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Control) return nullptr;
  if (!table().knows(entry.unit.id)) return nullptr;
  const Unit& unit = table().unit(entry.unit.id);
  const auto& set = table().process_set(entry.key.process_set);
  const bool is_direct = table().scope_of(entry.key.process_set) != Scope::Domain;
  if (is_direct && !may_be_direct(entry, set)) return nullptr;
  auto op = std::make_shared<PersistentOp>();
  op->set = table().share_process_set(entry.key.process_set);
  if (!op->set) return nullptr;
  op->is_direct = is_direct;
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : set.ranks)
    if (parts_.is_here(rank))
      op->indices.push_back(static_cast<int>(std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin()));
  op->unit = unit.ref();
  op->signature = unit.signatures.of(static_cast<std::size_t>(set.rank));
  if (!(unit.key == entry.key) || !op->signature || !(*op->signature == entry.signature)) return nullptr;
  const auto known = ops_.find(entry.key.process_set, kind, entry.key.name);
  if (known && known->unit == op->unit && known->signature == op->signature) return nullptr;
  if (!has_block) {
    op->location = kNoBlock;
    return op;
  }
  return lay_out(*op, entry) ? op : nullptr;
}

/// Says what lies where in the operation's block. Returns false if it is too large for one.
bool FastPath::lay_out(PersistentOp& op, const Entry& entry) const {
  const auto kind = entry.key.kind;
  const ProcessSetInfo& set = *op.set;
  const std::size_t ranks = set.ranks.size();
  const TensorSignature& tensor = entry.signature.tensors.front();
  op.memory = op.is_direct ? entry.backends.front()->direct_memory() : entry.backends.front()->fast_path_memory();
  op.traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, *op.set);
  for (const auto& member : entry.signature.tensors) {
    const auto before = static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype);
    op.count += element_count(member.shape);
    if (entry.signature.tensors.size() > 1)
      op.group.push_back({before, static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype) - before});
  }
  op.input_bytes = op.result_bytes = static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype);
  if (kind == OpKind::Allgather) {
    op.result_bytes *= ranks;
    op.result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
  }
  std::size_t most = std::max(op.input_bytes, op.result_bytes);  // that any rank's block has to hold
  if (kind == OpKind::Alltoall) {
    const std::int64_t rows = tensor.shape.front();
    const std::int64_t row = rows == 0 ? 0 : op.count / rows;
    for (const auto split : tensor.splits) op.parts.push_back(split * row);
    most = static_cast<std::size_t>(*std::max_element(op.parts.begin(), op.parts.end())) * ranks * element_bytes(tensor.dtype);
    op.result_rows = tensor.splits[static_cast<std::size_t>(set.rank)] * static_cast<std::int64_t>(ranks);
    op.result_bytes = static_cast<std::size_t>(op.result_rows * row) * element_bytes(tensor.dtype);
    most = std::max(most, op.input_bytes);
  }
  op.block_bytes = std::max<std::size_t>(most, 1);
  if (static_cast<std::int64_t>(most) > kSmallCallBytes) return false;
  const auto others = static_cast<std::size_t>(parts_.topology.domains) - 1;
  if (op.is_direct && op.memory->contribution_bytes(op.traits, op.count) * others > kDirectBytes) return false;
  if (kind == OpKind::Reducescatter) {
    const std::int64_t rows = tensor.shape.front();
    const std::size_t row = rows == 0 ? 0 : op.input_bytes / static_cast<std::size_t>(rows);
    const auto place = static_cast<std::size_t>(set.rank);
    for (std::size_t before = 0; before < place; ++before)
      op.result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
    op.result_rows = scattered_rows(rows, ranks, place);
    op.result_bytes = static_cast<std::size_t>(op.result_rows) * row;
  }
  return true;
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
  entry->announced = true;
  entry->locations.assign(op.memory != nullptr ? like.signature.tensors.size() : 0, op.location);
  for (std::size_t i = 0; i < op.group.size(); ++i) entry->locations[i] += op.group[i].at;
  entry->prepared.assign(entry->locations.size(), true);
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
      const auto location = op->memory->keep(op->traits, op->block_bytes);
      if (!location) return;
      op->location = *location;
      op->has_block = true;
      op->block = op->memory->kept(board_.self(), *location);
      if (op->block_bytes <= Board::kNoteBytes) op->note = board_.note(op->unit.id, board_.self()).data();
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

void FastPath::drop(const UnitKey& key) noexcept { static_cast<void>(ops_.remove(key)); }

bool FastPath::drop_set(int process_set) noexcept {
  const auto is_idle = [&](const PersistentOp& op) { return op.set->id == process_set && !op.in_use.load(); };
  while (const auto* key = ops_.find_if(is_idle)) drop(UnitKey(*key));
  return ops_.find_if([&](const PersistentOp& op) { return op.set->id == process_set; }) == nullptr;
}

std::size_t FastPath::drop_all() {
  const std::size_t count = ops_.size();
  while (const auto* key = ops_.find_if([](const PersistentOp&) { return true; })) drop(UnitKey(*key));
  return count;
}

// --------------------------------------------------------------------------------------------------------------------- running

/// Looks up what the ranks' table says of the operation, if there is anything new.
bool FastPath::is_valid(PersistentOp& op) {
  if (op.judged_at == board_.read_position()) return op.is_valid;
  op.judged_at = board_.read_position();
  op.is_valid = op.all_same = false;
  const int set = op.set->id;
  if (!table().has_process_set(set) || !table().joined(set).empty() || table().any_left() || !table().knows(op.unit.id)) return false;
  const Unit& unit = table().unit(op.unit.id);
  if (unit.generation != op.unit.generation) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  op.is_valid = unit.signatures.of(static_cast<std::size_t>(op.set->rank)) == op.signature;
  op.all_same = op.is_valid && unit.signatures.all_say({0, static_cast<int>(op.set->ranks.size())}, op.signature);
  return op.is_valid;
}

bool FastPath::is_ready(PersistentOp& op) {
  if (op.place.entry.empty() || !is_valid(op)) return false;
  if (op.memory != nullptr && !op.memory->is_free(op.location)) return false;
  return ledger_.empty() || ledger_.find(op.key()) == nullptr;
}

void FastPath::begin(PersistentOp& op, const SmallCall& call) {
  op.input = call.input;
  op.output = call.output;
  for (std::size_t i = 0; i < op.group.size(); ++i) {
    op.group[i].input = call.group[i].input;
    op.group[i].output = call.group[i].output;
  }
  op.allocate = call.allocate;
  op.context = call.context;
  op.is_to_fetch = op.is_alike = false;
  HandleState& pending = *op.pending;
  pending.done.store(false, std::memory_order_relaxed);
  pending.waited_for.store(false, std::memory_order_relaxed);
  pending.status = {};
  if (op.input_bytes == 0 || (call.kind == OpKind::Broadcast && call.root != parts_.topology.rank)) return;
  // Also where the note is enough: another rank may take the long way.
  for (const auto& member : op.group)
    if (member.bytes > 0) std::memcpy(op.block + member.at, member.input, member.bytes);
  if (op.group.empty()) std::memcpy(op.block, call.input, op.input_bytes);
  if (op.note != nullptr) std::memcpy(op.note, op.group.empty() ? call.input : op.block, op.input_bytes);
}

std::shared_ptr<PersistentOp> FastPath::start(const SmallCall& call) {
  if (ops_.size() == 0) return nullptr;
  std::shared_ptr<PersistentOp> op;
  try {
    log_.read();
    if (call.known != nullptr) op = call.known->lock();
    const bool known = op != nullptr;
    if (!known) {
      std::string_view name = call.name;
      std::array<char, kUnnamedText> text{};
      if (name.empty()) {
        if (!queue_.empty()) return nullptr;
        name = queue_.next_name(call.process_set, call.kind, text);
      }
      op = ops_.find(call.process_set, call.kind, name);
    }
    if (op && op->owner) take_results();  // it may have ended, and nobody has looked
    if (!op || op->in_use.load(std::memory_order_acquire)) return nullptr;
    op->in_use.store(true, std::memory_order_relaxed);  // whoever else would says so under the engine's mutex
    board_.prepare_arrival(op->unit.id);
    bool arrived = false;
    if ((known || op->fits(call)) && is_ready(*op)) {
      begin(*op, call);
      arrived = arrive(*op);
    }
    if (!arrived) {
      op->in_use.store(false);
      if (known) call.known->reset();  // another may have taken its place
      return nullptr;
    }
    if (call.known != nullptr && !known) *call.known = op;
    if (call.name.empty()) queue_.use_name(call.process_set, call.kind);
  } catch (...) {
    board_.set_failure(status_of_current_exception());
    if (!op) return nullptr;
    if (op->state == PersistentOp::State::Idle && !op->pending->done) {  // it had not arrived yet
      op->in_use.store(false);
      return nullptr;
    }
  }
  auto& stats = parts_.stats->fast_path;
  stats.add(stats.tensors_submitted, call.kind == OpKind::Barrier ? 0 : std::max<std::size_t>(1, op->group.size()));
  return op;
}

/// Returns false if the unit was evicted meanwhile.
bool FastPath::arrive(PersistentOp& op) {
  board_.set_location(op.unit.id, op.location);
  for (std::uint32_t i = 1; i < op.group.size(); ++i) board_.keep_location(op.unit.id + i, op.location + op.group[i].at);
  if (!op.is_direct && arrive_last(op)) return true;
  const std::uint32_t arrived = board_.arrive(op.unit.id, op.unit.generation);
  if (arrived == 0) return false;
  op.state = PersistentOp::State::Arrived;
  arrived_.push_back(&op);
  if (op.is_direct) direct_ops_.push_back(&op);
  log_.read();  // which may end it
  if (op.state == PersistentOp::State::Idle) return true;
  const bool is_last = arrived == op.indices.size();
  if (is_last && op.is_direct && can_run_for_all(op)) {
    if (parts_.topology.domain_index != 0 && !board_.leader_looks()) mutex_.wake_leader();  // it goes on from here
    return true;
  }
  if (is_last && !op.is_direct && can_run_for_all(op) &&
      board_.claim(op.unit.id, op.unit.generation, static_cast<std::uint32_t>(op.indices.size()))) {
    run_for_all(op);
    return true;
  }
  // A rank that has joined or left meanwhile may have looked here before this one arrived, but then its record has been read just now.
  if (is_last || !is_valid(op)) engine_.arrived(adopt(op), arrived);
  return true;
}

Entry& FastPath::adopt(PersistentOp& op) {
  if (op.state == PersistentOp::State::Adopted) return *ledger_.find(op.unit);
  if (!ledger_.put_back(op.place)) throw std::logic_error("the fast path: an operation under a name that is in flight");
  op.state = PersistentOp::State::Adopted;
  Entry& entry = *ledger_.find(op.unit);
  entry.state = EntryState::Waiting;
  entry.unfinished = 0;
  entry.prepared.assign(entry.prepared.size(), true);
  entry.rows.clear();
  entry.before.clear();
  entry.since = entry.reported = Clock::now();
  for (std::size_t i = 0; i < op.group.size(); ++i) {
    entry.submission.tensors[i].input = op.group[i].input;
    entry.submission.tensors[i].output = op.group[i].output;
  }
  if (op.group.empty() && !entry.submission.tensors.empty()) {
    entry.submission.tensors.front().input = op.input;
    entry.submission.tensors.front().output = op.output;
  }
  return entry;
}

void FastPath::adopt_all() {
  for (PersistentOp* op : arrived_)
    if (op->state == PersistentOp::State::Arrived) adopt(*op);
}

void FastPath::await(const PersistentOp& op) {
  const auto is_done = [&] { return board_.has_result(op.unit.id) || op.pending->done.load(std::memory_order_relaxed); };
  short_wait_.until(is_done);
}

/// Where all others have arrived: arrives, claims the round and ends it in one. What one of them says between the look at the log and the
/// claim, it says of a round that it has arrived in, and finds ended.
bool FastPath::arrive_last(PersistentOp& op) {
  if (!board_.expect_to_be_last(op.unit.id, op.indices) || !can_run_for_all(op)) return false;
  if (!board_.arrive_last(op.unit.id, op.unit.generation, static_cast<std::uint32_t>(op.indices.size()))) return false;
  op.state = PersistentOp::State::Arrived;
  arrived_.push_back(&op);
  run_for_all(op);
  return true;
}

/// Finds the ranks' blocks. Requires that all but this rank have arrived.
bool FastPath::can_run_for_all(PersistentOp& op) {
  // What another has said since this rank has read, the long way deals with. From the claim on nobody says anything of the unit.
  if (!is_valid(op) || !op.all_same || board_.tail() != board_.read_position()) return false;
  return find_blocks(op);
}

bool FastPath::find_blocks(const PersistentOp& op) {
  const std::uint32_t unit = op.unit.id;
  blocks_.clear();
  for (const int index : op.indices) {
    const std::uint64_t location = board_.coming_location(unit, index);
    std::byte* const block = op.memory != nullptr ? op.memory->kept(index, location) : nullptr;
    if (op.memory != nullptr ? block == nullptr : location != kNoBlock) return false;  // it takes the long way
    blocks_.push_back(op.note != nullptr ? board_.note(unit, index).data() : block);
  }
  return true;
}

/// Does the work in the blocks that were found. Requires the claim.
void FastPath::run_for_all(PersistentOp& op) {
  if (op.memory != nullptr) op.memory->run_for_all(op.traits, op.count, blocks_, op.parts);
  tell_results(op);
}

void FastPath::give_results(PersistentOp& op) {
  // Nobody else ends what is promised.
  if (!board_.claim(op.unit.id, op.unit.generation, static_cast<std::uint32_t>(op.indices.size())))
    throw std::logic_error("the fast path: a promised round that another has ended");
  tell_results(op);
}

void FastPath::take_long_way(PersistentOp& op) { engine_.arrived(adopt(op), static_cast<std::uint32_t>(op.indices.size())); }

void FastPath::tell_results(PersistentOp& op) {
  board_.give_results(op.unit.id, op.indices);
  board_.reset_arrivals(op.unit.id, 1);
  take_result(op);
  mutex_.wake_watchers();
}

bool FastPath::has_results() const {
  return std::any_of(arrived_.begin(), arrived_.end(), [&](const PersistentOp* op) { return board_.has_result(op->unit.id); });
}

void FastPath::take_results() {
  for (std::size_t i = 0; i < arrived_.size();) {
    PersistentOp& op = *arrived_[i];
    const bool waits = op.state == PersistentOp::State::Arrived || ledger_.find(op.unit)->state == EntryState::Waiting;
    if (waits && board_.has_result(op.unit.id)) {
      take_result(op);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void FastPath::take_result(PersistentOp& op) {
  op.is_alike = true;
  board_.take_result(op.unit.id);
  const bool is_source = op.traits.kind == OpKind::Broadcast && op.traits.root == parts_.topology.rank;
  if (op.memory != nullptr && !(is_source && op.input == op.output)) {
    op.is_to_fetch = op.output == nullptr && op.allocate != nullptr;
    // The note is not the operation's own: it may belong to the next one before the caller has fetched the result.
    void* const output = op.is_to_fetch ? op.block + op.result_at : op.output;
    const std::byte* const result = (op.note != nullptr ? op.note : op.block) + op.result_at;
    for (const auto& member : op.group)
      if (member.bytes > 0) std::memcpy(member.output, result + member.at, member.bytes);
    if (op.group.empty() && op.result_bytes > 0 && output != result) std::memcpy(output, result, op.result_bytes);
  }
  auto& stats = parts_.stats->fast_path;
  stats.add(stats.negotiation_rounds, 1);
  if (op.memory != nullptr) stats.add(stats.batches_run, 1);
  if (op.memory != nullptr && reduces(op.traits.kind)) stats.add(stats.bytes_reduced, op.input_bytes);
  if (op.state == PersistentOp::State::Adopted) {
    Entry& entry = *ledger_.find(op.unit);
    entry.state = advance(entry.state, EntryEvent::Agree);
    return engine_.finish(entry, {});
  }
  ended(op);
  op.pending->done.store(true, std::memory_order_release);
  let_go(op);
  mutex_.wake_own_threads();
  if (queue_.empty()) return;
  mutex_.wake_waiters();  // whoever drives next has something to announce
  mutex_.wake_worker();
}

void FastPath::fetch(PersistentOp& op, const SmallCall& call) {
  if (op.is_alike) {
    std::fill(call.received.begin(), call.received.end(), op.result_rows / static_cast<std::int64_t>(op.indices.size()));
  } else if (!call.received.empty()) {
    std::copy_n(op.pending->rows.at(0).begin(), call.received.size(), call.received.begin());
  }
  if (!std::exchange(op.is_to_fetch, false)) return;
  void* const output = op.allocate(op.context, op.result_rows);
  if (op.result_bytes > 0) std::memcpy(output, op.block + op.result_at, op.result_bytes);
}

bool FastPath::end(Entry& entry, bool failed) {
  PersistentOp& op = *entry.op;
  if (failed && board_.has_result(entry.unit.id) && entry.state == EntryState::Waiting) {
    take_result(op);  // it was done before that
    return false;
  }
  ended(op);
  let_go(op);
  return true;
}

void FastPath::ended(PersistentOp& op) {
  op.state = PersistentOp::State::Idle;
  std::erase(arrived_, &op);
  if (op.is_direct) std::erase(direct_ops_, &op);
}

/// It has ended: it is nobody's where its caller does not come back.
void FastPath::let_go(PersistentOp& op) {
  if (!op.owner) return;
  mutex_.destroy(std::move(op.owner));
  op.in_use.store(false);
}

}  // namespace hvd
