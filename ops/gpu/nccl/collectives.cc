#include "ops/gpu/nccl/collectives.h"

#include <algorithm>
#include <functional>
#include <optional>

namespace hvd::gpu {

void LaunchOrder::begin(const CallContext& site, const Stream& stream) {
  if (!last_) last_.emplace(site);
  if (of_ != nullptr && of_ != &stream) stream.wait_for(site, last_->get());
}

void LaunchOrder::end(const CallContext& site, const Stream& stream) {
  last_->record(site, stream);
  of_ = &stream;
}

std::vector<std::shared_ptr<Communicator>> LaunchContext::communicators() const {
  if (levels) return {levels->host.communicator, levels->across.communicator};
  return communicator ? std::vector{communicator} : std::vector<std::shared_ptr<Communicator>>{};
}

std::size_t bytes_of(std::int64_t count, std::size_t element) {
  return static_cast<std::size_t>(count) * element;
}

Layout lay_out(std::span<const Piece> pieces, std::size_t element) {
  Layout layout;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    layout.pieces.push_back(&piece);
    layout.offsets.push_back(layout.bytes);
    layout.bytes += aligned_to_member(bytes_of(piece.count, element));
  }
  return layout;
}

void copy(const LaunchContext& context, const std::vector<CopyItem>& items, DataType from,
          DataType to, const Scaling& scaling) {
  if (items.empty()) return;
  const CopyJob job{
      .items = items, .from = from, .to = to, .factor = scaling.factor, .divisor = scaling.divisor};
  check(context.site, context.site.table->batched_copy(job, context.stream.get()),
        "launch_batched_copy");
}

void scale(const LaunchContext& context, void* values, std::int64_t count, DataType type,
           const Scaling& scaling) {
  if (!scaling.none()) copy(context, {{values, values, count}}, type, type, scaling);
}

void append_packing(std::vector<CopyItem>& items, const Layout& layout, int lanes,
                    std::byte* buffer) {
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    items.push_back(
        {layout.pieces[i]->input, buffer + layout.offsets[i], layout.pieces[i]->count * lanes});
  }
}

void pack(const LaunchContext& context, const Layout& layout, int lanes, std::byte* buffer,
          DataType from, DataType wire, const Scaling& scaling) {
  std::vector<CopyItem> items;
  append_packing(items, layout, lanes, buffer);
  copy(context, items, from, wire, scaling);
}

void unpack(const LaunchContext& context, const Layout& layout, int lanes, const std::byte* buffer,
            DataType wire, DataType to, const Scaling& scaling) {
  std::vector<CopyItem> items;
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    items.push_back(
        {buffer + layout.offsets[i], layout.pieces[i]->output, layout.pieces[i]->count * lanes});
  }
  copy(context, items, wire, to, scaling);
}

void reduce_scatter(const LaunchContext& context, const CommGroup& comm_group, const void* send,
                    void* receive, std::size_t count, const ReductionPlan& plan) {
  const NcclCode code =
      context.site.table->reduce_scatter(send, receive, count, nccl_type(plan.wire), plan.op,
                                         comm_group.communicator->get(), context.stream.get());
  comm_group.communicator->settle(context.site, code, "ncclReduceScatter");
}

void move(const LaunchContext& context, std::string_view call, NcclCode code,
          const std::optional<Group>& group) {
  if (!group) return context.communicator->settle(context.site, code, call);
  // settled at the group's end
  if (code != NcclCode::InProgress) check(context.site, code, call, context.communicator->get());
}

bool equal_counts(const Piece& piece) {
  return std::adjacent_find(piece.counts.begin(), piece.counts.end(), std::not_equal_to<>()) ==
         piece.counts.end();
}

bool moves_anything(const Piece& piece) {
  return std::any_of(piece.counts.begin(), piece.counts.end(),
                     [](std::int64_t count) { return count != 0; });
}

namespace {

void all_reduce(const LaunchContext& context, const CommGroup& comm_group, const void* send,
                void* receive, std::size_t count, const ReductionPlan& plan) {
  const NcclCode code =
      context.site.table->all_reduce(send, receive, count, nccl_type(plan.wire), plan.op,
                                     comm_group.communicator->get(), context.stream.get());
  comm_group.communicator->settle(context.site, code, "ncclAllReduce");
}

void all_reduce_by_levels(const LaunchContext& context, const void* send, void* receive,
                          std::size_t count, const ReductionPlan& plan) {
  const auto& [host, across] = *context.levels;
  const std::size_t element = element_bytes(plan.wire);
  // shares begin where NCCL's kernels read and write 16 bytes at once
  const std::size_t whole = std::size_t{16} / element;
  const std::size_t share = count / static_cast<std::size_t>(host.ranks) / whole * whole;
  const std::size_t shared = share * static_cast<std::size_t>(host.ranks);
  const auto* from = static_cast<const std::byte*>(send);
  auto* to = static_cast<std::byte*>(receive);
  if (share > 0) {
    std::byte* mine = to + static_cast<std::size_t>(host.rank) * share * element;
    reduce_scatter(context, host, from, mine, share, plan);
    all_reduce(context, across, mine, mine, share, plan);
    const NcclCode code = context.site.table->all_gather(
        mine, to, share, nccl_type(plan.wire), host.communicator->get(), context.stream.get());
    host.communicator->settle(context.site, code, "ncclAllGather");
  }
  if (shared == count) return;
  all_reduce(context, host, from + shared * element, to + shared * element, count - shared, plan);
  all_reduce(context, across, to + shared * element, to + shared * element, count - shared, plan);
}

void all_reduce(const LaunchContext& context, const void* send, void* receive, std::size_t count,
                const ReductionPlan& plan) {
  if (context.levels) return all_reduce_by_levels(context, send, receive, count, plan);
  all_reduce(context, context, send, receive, count, plan);
}

/// Folds a zero into the values that are about to be reduced.
void fold_zeros(const LaunchContext& context, const ReductionPlan& plan, ReduceOp op, void* values,
                std::int64_t count) {
  const void* const input = values;
  ReduceJob job;
  job.inputs = std::span(&input, 1);
  job.outputs = std::span(&values, 1);
  job.counts = std::span(&count, 1);
  job.dtype = plan.wire;
  job.op = op;
  job.zeros = true;
  check(context.site, context.site.table->shared_reduce(job, context.stream.get()),
        "launch_shared_reduce");
}

/// Tensors that need not travel.
void copy_alone(const LaunchContext& context, const ReductionPlan& plan,
                std::span<const Piece> pieces) {
  std::vector<CopyItem> items;
  for (const Piece& piece : pieces)
    if (piece.input != piece.output || !plan.before.none())
      items.push_back({piece.input, piece.output, piece.count * plan.lanes});
  copy(context, items, plan.type, plan.type, plan.before);
  if (plan.after.none()) return;
  items.clear();
  for (const Piece& piece : pieces)
    items.push_back({piece.output, piece.output, piece.count * plan.lanes});
  copy(context, items, plan.type, plan.type, plan.after);
}

void reduce_direct(const LaunchContext& context, const ReductionPlan& plan, const Piece& piece) {
  const std::int64_t count = piece.count * plan.lanes;
  const void* send = piece.input;
  if (!plan.before.none()) {
    copy(context, {{send, piece.output, count}}, plan.type, plan.type, plan.before);
    send = piece.output;
  }
  context.in_order(
      [&] { all_reduce(context, send, piece.output, static_cast<std::size_t>(count), plan); });
  scale(context, piece.output, count, plan.type, plan.after);
}

/// Returns where the outputs lie, if they lie just as they would in the fusion buffer, and nothing
/// that matters lies between them; else null.
std::byte* home_of(const LaunchContext& context, const ReductionPlan& plan, const Layout& layout) {
  if (plan.wire != plan.type) return nullptr;
  auto* const begin = static_cast<std::byte*>(layout.pieces.front()->output);
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    const Piece& piece = *layout.pieces[i];
    if (piece.output != begin + layout.offsets[i]) return nullptr;
    const std::size_t bytes = bytes_of(piece.count * plan.lanes, element_bytes(plan.wire));
    if (!piece.padded && bytes != aligned_to_member(bytes)) return nullptr;
  }
  return context.lent.has(begin, layout.bytes) ? begin : nullptr;
}

/// Copies there what does not lie there yet, and scales.
void take_home(const LaunchContext& context, const ReductionPlan& plan, const Layout& layout,
               std::byte* home, std::int64_t count) {
  const auto is_there = [](const Piece* piece) { return piece->input == piece->output; };
  if (std::all_of(layout.pieces.begin(), layout.pieces.end(), is_there))
    return scale(context, home, count, plan.wire, plan.before);
  std::vector<CopyItem> items;
  for (const Piece* piece : layout.pieces)
    if (!is_there(piece) || !plan.before.none())
      items.push_back({piece->input, piece->output, piece->count * plan.lanes});
  copy(context, items, plan.type, plan.type, plan.before);
}

void reduce_fused(const LaunchContext& context, const ReductionPlan& plan, ReduceOp op,
                  std::span<const Piece> pieces) {
  const std::size_t element = element_bytes(plan.wire);
  const Layout layout = lay_out(pieces, element * static_cast<std::size_t>(plan.lanes));
  const auto count = static_cast<std::int64_t>(layout.bytes / element);
  std::byte* const home = home_of(context, plan, layout);
  std::byte* const buffer = home != nullptr
                                ? home
                                : context.fusion.reserve(context.site, layout.bytes, context.stream,
                                                         context.communicators());
  if (home != nullptr) {
    take_home(context, plan, layout, home, count);
  } else {
    pack(context, layout, plan.lanes, buffer, plan.type, plan.wire, plan.before);
  }
  if (plan.zeros) fold_zeros(context, plan, op, buffer, count);
  context.in_order([&] { all_reduce(context, buffer, buffer, layout.bytes / element, plan); });
  if (home != nullptr) {
    scale(context, home, count, plan.wire, plan.after);
  } else {
    unpack(context, layout, plan.lanes, buffer, plan.wire, plan.type, plan.after);
  }
}

void broadcast(const LaunchContext& context, const void* send, void* receive, std::size_t bytes,
               int root, const std::optional<Group>& group) {
  const auto& table = *context.site.table;
  move(context, "ncclBroadcast",
       table.broadcast(send, receive, bytes, NcclType::Uint8, root, context.communicator->get(),
                       context.stream.get()),
       group);
}

void gather(const LaunchContext& context, const Piece& piece, std::size_t element,
            const std::optional<Group>& group) {
  const auto& table = *context.site.table;
  const auto& counts = piece.counts;
  if (equal_counts(piece)) {
    const std::size_t bytes = bytes_of(piece.count, element);
    return move(context, "ncclAllGather",
                table.all_gather(piece.input, piece.output, bytes, NcclType::Uint8,
                                 context.communicator->get(), context.stream.get()),
                group);
  }
  auto* place = static_cast<std::byte*>(piece.output);
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    const std::size_t bytes = bytes_of(counts[rank], element);
    // only the root's `send` is read
    if (bytes != 0) broadcast(context, piece.input, place, bytes, static_cast<int>(rank), group);
    place += bytes;
  }
}

}  // namespace

void enqueue_allreduce(const LaunchContext& context, const Reduction& reduction,
                       std::span<const Piece> pieces) {
  const auto full = [](const Piece& piece) { return piece.count != 0; };
  const auto fulls = std::count_if(pieces.begin(), pieces.end(), full);
  if (fulls == 0) return;
  const ReductionPlan plan = plan_reduction(reduction, context.ranks, context.sums_only);
  if (context.ranks == 1 && reduction.joined == 0) return copy_alone(context, plan, pieces);
  if (fulls == 1 && plan.wire == plan.type && !plan.zeros) {
    reduce_direct(context, plan, *std::find_if(pieces.begin(), pieces.end(), full));
  } else {
    reduce_fused(context, plan, reduction.op, pieces);
  }
}

void enqueue_broadcast(const LaunchContext& context, DataType dtype, int root,
                       std::span<const Piece> pieces) {
  const bool sends = root == context.rank;
  Layout layout = lay_out(pieces, element_bytes(dtype));
  if (layout.pieces.empty()) return;
  if (layout.pieces.size() == 1) {
    const Piece& piece = *layout.pieces.front();
    return context.in_order([&] {
      broadcast(context, sends ? piece.input : piece.output, piece.output,
                bytes_of(piece.count, element_bytes(dtype)), root, {});
    });
  }
  std::byte* buffer =
      context.fusion.reserve(context.site, layout.bytes, context.stream, context.communicators());
  if (sends) pack(context, layout, 1, buffer, dtype, dtype, {});
  context.in_order([&] { broadcast(context, buffer, buffer, layout.bytes, root, {}); });
  // the root's own outputs are often its inputs
  for (std::size_t i = layout.pieces.size(); i-- > 0;) {
    if (!sends || layout.pieces[i]->input != layout.pieces[i]->output) continue;
    layout.pieces.erase(layout.pieces.begin() + static_cast<std::ptrdiff_t>(i));
    layout.offsets.erase(layout.offsets.begin() + static_cast<std::ptrdiff_t>(i));
  }
  unpack(context, layout, 1, buffer, dtype, dtype, {});
}

void enqueue_allgather(const LaunchContext& context, DataType dtype,
                       std::span<const Piece> pieces) {
  if (std::none_of(pieces.begin(), pieces.end(), moves_anything)) return;
  context.in_order([&] {
    std::optional<Group> group;
    group.emplace(context.site);
    for (const Piece& piece : pieces) {
      if (moves_anything(piece)) gather(context, piece, element_bytes(dtype), group);
    }
    context.communicator->settle(context.site, group->end(), "ncclGroupEnd");
  });
}

}  // namespace hvd::gpu
