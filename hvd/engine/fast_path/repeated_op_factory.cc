#include "hvd/engine/fast_path/repeated_op_factory.h"

#include <algorithm>
#include <utility>

#include "hvd/base/log.h"

namespace hvd {

namespace {

/// Returns whether all tensors of the operation may lie in one block: there is one, or they are a
/// group that is reduced, of one type, and no larger than a SmallCall's.
bool is_one_block(const Entry& entry) {
  const auto& tensors = entry.signature.tensors;
  if (tensors.empty() || tensors.size() > limit(Limit::GroupTensors) ||
      entry.backends.size() != tensors.size())
    return false;
  return tensors.size() == 1 || (entry.key.kind == OpKind::Allreduce &&
                                 std::ranges::all_of(tensors, [&](const auto& tensor) {
                                   return tensor.dtype == tensors.front().dtype;
                                 }));
}

/// Returns whether each rank may get its result out of the others' blocks.
bool may_be_pulled(const RepeatedOp& op) {
  return !op.is_direct() && routes::is_lent(op.traits.kind, op.input_bytes, op.set->ranks.size());
}

}  // namespace

/// Returns whether the leaders of all domains may end the operation's rounds among themselves.
bool RepeatedOpFactory::may_be_direct(const Entry& entry, const ProcessSetInfo& set) const {
  if (!routes::may_be_direct(static_cast<std::size_t>(parts_.topology.domains))) return false;
  if (entry.key.kind != OpKind::Barrier &&
      (entry.backends.empty() || entry.backends.front()->leader_memory() == nullptr))
    return false;
  return set.ranks.size() == static_cast<std::size_t>(parts_.topology.size);
}

std::shared_ptr<RepeatedOp> RepeatedOpFactory::describe(const Entry& entry) const {
  const auto kind = entry.key.kind;
  const bool has_block = is_one_block(entry);
  if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Control) return nullptr;
  // Where each rank keeps as many elements as it has said, its part is not what is laid out here.
  if (kind == OpKind::Reducescatter && !entry.signature.tensors.front().splits.empty())
    return nullptr;
  if (!table().knows(entry.unit.id)) return nullptr;
  const Unit& unit = table().unit(entry.unit.id);
  const auto& set = table().sets().info(entry.key.process_set);
  const bool is_direct = table().sets().scope_of(entry.key.process_set) != Scope::Domain;
  if (is_direct && !may_be_direct(entry, set)) return nullptr;
  auto op = std::make_shared<RepeatedOp>();
  op->key = entry.key;
  op->set = table().sets().share(entry.key.process_set);
  if (!op->set) return nullptr;
  if (is_direct) op->route = Route::Direct;
  // In rank order, as a round's sums are: blocks are reduced in the order of indices.
  for (const int rank : set.ranks)
    if (parts_.is_here(rank)) op->indices.push_back(parts_.topology.index_here(rank));
  op->unit = unit.ref();
  op->signature = unit.signatures.of(static_cast<std::size_t>(set.rank));
  if (!(unit.key == entry.key) || !op->signature || !(*op->signature == entry.signature))
    return nullptr;
  if (!has_block) {
    op->location = kNoBlock;
    return op;
  }
  return lay_out(*op, entry) ? op : nullptr;
}

/// Says what lies where in the operation's block. Returns false if it is too large for one.
bool RepeatedOpFactory::lay_out(RepeatedOp& op, const Entry& entry) const {
  const auto kind = entry.key.kind;
  const ProcessSetInfo& set = *op.set;
  const std::size_t ranks = set.ranks.size();
  const TensorSignature& tensor = entry.signature.tensors.front();
  if (op.is_direct()) {
    op.memory = op.leaders = entry.backends.front()->leader_memory();
  } else {
    op.memory = op.slots = entry.backends.front()->slot_memory();
  }
  op.traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, *op.set);
  for (const auto& member : entry.signature.tensors) {
    const auto before = static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype);
    op.count += element_count(member.shape);
    if (entry.signature.tensors.size() > 1)
      op.group.push_back(
          {before, static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype) - before});
  }
  op.input_bytes = op.result_bytes =
      static_cast<std::size_t>(op.count) * element_bytes(tensor.dtype);
  if (kind == OpKind::Allgather) {
    op.result_bytes *= ranks;
    op.result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
  }
  // that any rank's block has to hold
  std::size_t most = std::max(op.input_bytes, op.result_bytes);
  if (kind == OpKind::Alltoall) {
    const std::int64_t rows = tensor.shape.front();
    const std::int64_t row = rows == 0 ? 0 : op.count / rows;
    for (const auto split : tensor.splits) op.parts.push_back(split * row);
    most = static_cast<std::size_t>(*std::max_element(op.parts.begin(), op.parts.end())) * ranks *
           element_bytes(tensor.dtype);
    op.result_rows =
        tensor.splits[static_cast<std::size_t>(set.rank)] * static_cast<std::int64_t>(ranks);
    op.result_bytes = static_cast<std::size_t>(op.result_rows * row) * element_bytes(tensor.dtype);
    most = std::max(most, op.input_bytes);
  }
  op.block_bytes = std::max<std::size_t>(most, 1);
  const auto domains = static_cast<std::size_t>(parts_.topology.domains);
  const bool is_small = routes::is_at_slot(most, op.is_direct() ? domains : 1);
  if (!is_small && !may_be_pulled(op)) return false;
  if (!is_small) op.route = Route::EachItsPart;
  if (op.is_pulled()) op.sources.reserve(ranks);
  if (op.is_direct() &&
      !routes::is_direct(kind, op.leaders->contribution_bytes(op.traits, op.count), domains))
    return false;
  if (kind == OpKind::Reducescatter) {
    const std::int64_t rows = tensor.shape.front();
    const std::size_t row = rows == 0 ? 0 : op.input_bytes / static_cast<std::size_t>(rows);
    const auto place = static_cast<std::size_t>(set.rank);
    for (std::size_t before = 0; before < place; ++before)
      op.result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
    op.result_rows = scattered_rows(rows, ranks, place);
    op.result_bytes = static_cast<std::size_t>(op.result_rows) * row;
    for (std::size_t to = 0; op.is_pulled() && to < ranks; ++to)
      op.parts.push_back(scattered_rows(rows, ranks, to) *
                         (op.count / std::max<std::int64_t>(rows, 1)));
  }
  return true;
}

bool RepeatedOpFactory::give_block(RepeatedOp& op) const {
  if (op.location == kNoBlock) return true;
  if (op.memory == nullptr) return false;
  if (op.is_pulled()) return true;  // each round has its own
  const auto location = op.memory->keep(op.traits, op.block_bytes);
  if (!location) return false;
  op.location = *location;
  op.block = op.memory->kept(board_.self(), *location);
  if (op.block_bytes <= Rounds::kNoteBytes)
    op.note = board_.rounds().note(op.unit.id, board_.self()).data();
  return true;
}

std::unique_ptr<Entry> RepeatedOpFactory::entry_for(RepeatedOp& op, const Entry& like) {
  auto entry = std::make_unique<Entry>();
  entry->key = like.key;
  entry->signature = like.signature;
  entry->backends = like.backends;
  entry->op = &op;
  entry->submission = like.submission;
  entry->submission.keep_alive = nullptr;
  entry->submission.allocate = [raw = &op](std::size_t /*index*/, std::int64_t rows) -> void* {
    return raw->allocate != nullptr ? raw->allocate(raw->context, rows) : nullptr;
  };
  entry->announced = true;
  entry->locations.assign(op.memory != nullptr ? like.signature.tensors.size() : 0, op.location);
  for (std::size_t i = 0; i < op.group.size(); ++i) entry->locations[i] += op.group[i].at;
  entry->prepared.assign(entry->locations.size(), true);
  return entry;
}

// ----------------------------------------------------------------------------- making and dropping

/// Drops operations of names that did not come back, until there is space for one more. Returns
/// false if there are none of them.
bool RepeatedOpFactory::make_space() {
  while (ops_.size() >= board_.slots()) {
    const auto* stale = ops_.find_if([&](const RepeatedOp& other) {
      return !other.place.entry.empty() && !other.in_use.load() &&
             (!table().knows(other.unit.id) ||
              table().unit(other.unit.id).generation != other.unit.generation);
    });
    if (stale == nullptr) return false;
    drop(UnitKey(*stale));
  }
  return true;
}

void RepeatedOpFactory::make(const Entry& entry) noexcept {
  try {
    auto op = describe(entry);
    if (!op) return;
    const auto known = ops_.find(entry.key.process_set, entry.key.kind, entry.key.name);
    if (known && known->unit == op->unit && known->signature == op->signature) return;
    if (op->location != kNoBlock) {
      if (!make_space()) return;
      drop(entry.key);
    }
    if (!give_block(*op)) return;
    if (op->is_pulled()) lender_ = op->slots;
    auto fresh = entry_for(*op, entry);
    op->pending = fresh->pending = entry.pending;
    op->is_handed_out = true;
    // By way of the ledger, for its nodes. The entry that has just ended is out of it.
    Entry& placed = ledger_.admit(std::move(fresh));
    ledger_.bind(placed, op->unit);
    op->place = ledger_.take_out(placed);
    const RouteRow& row = all_routes()[static_cast<std::size_t>(op->route)];
    log(LogLevel::Debug, "{} '{}', {} bytes, from now on where its caller waits: {}, by {}: {}",
        name_of(entry.key.kind), display_name(entry.key.name), op->input_bytes,
        name_of(RouteChoice{op->route, op->is_pulled() ? Access::Lent : Access::None}), row.who,
        row.why);
    ops_.add(entry.key, std::move(op));
  } catch (...) {
    log(LogLevel::Debug, "no repeated operation for '{}': {}", display_name(entry.key.name),
        status_of_current_exception().text());
  }
}

void RepeatedOpFactory::drop(const UnitKey& key) noexcept {
  const auto op = ops_.remove(key);
  if (op && op->is_handed_out) ledger_.note_unseen(key, op->pending);
}

bool RepeatedOpFactory::drop_set(int process_set) noexcept {
  const auto is_idle = [&](const RepeatedOp& op) {
    return op.set->id == process_set && !op.in_use.load();
  };
  while (const auto* key = ops_.find_if(is_idle)) drop(UnitKey(*key));
  return ops_.find_if([&](const RepeatedOp& op) { return op.set->id == process_set; }) == nullptr;
}

std::size_t RepeatedOpFactory::drop_all() {
  const std::size_t count = ops_.size();
  while (const auto* key = ops_.find_if([](const RepeatedOp&) { return true; }))
    drop(UnitKey(*key));
  if (lender_ != nullptr) lender_->trim();
  return count;
}

}  // namespace hvd
