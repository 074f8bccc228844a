// Alltoall and reducescatter.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc
#include <algorithm>
#include <optional>
#include <utility>

#include "ops/gpu/nccl/collectives.h"

namespace hvd::gpu {

namespace {

/// Exchanges a piece with the other ranks. `own`: is given this rank's own part.
void exchange(const LaunchContext& context, const Piece& piece, std::size_t element,
              const std::optional<Group>& group, std::vector<CopyItem>& own) {
  const auto& table = *context.site.table;
  const auto* from = static_cast<const std::byte*>(piece.input);
  auto* to = static_cast<std::byte*>(piece.output);
  for (int rank = 0; rank < context.ranks; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    const std::size_t sent = bytes_of(piece.sends[place], element);
    const std::size_t received = bytes_of(piece.counts[place], element);
    if (rank == context.rank) {
      if (sent != 0) own.push_back({from, to, piece.sends[place]});
    } else {
      if (sent != 0)
        move(context, "ncclSend",
             table.send(from, sent, NcclType::Uint8, rank, context.communicator->get(),
                        context.stream.get()),
             group);
      if (received != 0)
        move(context, "ncclRecv",
             table.receive(to, received, NcclType::Uint8, rank, context.communicator->get(),
                           context.stream.get()),
             group);
    }
    from += sent;
    to += received;
  }
}

/// A batch sorted by the rank that keeps it.
struct Parts {
  std::vector<Layout> layouts;      ///< of each rank's part
  std::vector<std::size_t> starts;  ///< of the parts in the buffer; one more for the end
  bool equal = true;                ///< whether all parts take the same room
};

/// The piece that stands for what `rank` keeps of this one, in the whole input.
Piece part_of(const Piece& piece, std::size_t rank, std::size_t element) {
  Piece part = piece;
  for (std::size_t other = 0; other < rank; ++other)
    part.input = static_cast<const std::byte*>(part.input) + bytes_of(piece.counts[other], element);
  part.count = piece.counts[rank];
  return part;
}

/// `parts`: of each rank, in the pieces' order; `element`: bytes of one in the buffer.
Parts lay_out_parts(const std::vector<std::vector<Piece>>& parts, std::size_t element) {
  Parts made;
  std::size_t longest = 0;
  std::size_t total = 0;
  for (const auto& part : parts) {
    made.layouts.push_back(lay_out(part, element));
    longest = std::max(longest, made.layouts.back().bytes);
    total += made.layouts.back().bytes;
  }
  made.equal = longest * parts.size() <= total + total / 4;
  made.starts.push_back(0);
  for (const auto& layout : made.layouts)
    made.starts.push_back(made.starts.back() + (made.equal ? longest : layout.bytes));
  return made;
}

/// Leaves in each rank's part of the buffer the sum of all ranks' values there.
void reduce_parts(const LaunchContext& context, const ReductionPlan& plan, std::byte* buffer,
                  const Parts& parts) {
  const std::size_t element = element_bytes(plan.wire);
  if (parts.equal) {
    std::byte* own = buffer + parts.starts[static_cast<std::size_t>(context.rank)];
    return reduce_scatter(context, context, buffer, own, parts.starts[1] / element, plan);
  }
  std::optional<Group> group;
  group.emplace(context.site);
  for (std::size_t rank = 0; rank < parts.layouts.size(); ++rank) {
    if (parts.layouts[rank].bytes == 0) continue;
    std::byte* part = buffer + parts.starts[rank];
    move(context, "ncclReduce",
         context.site.table->reduce(part, part, parts.layouts[rank].bytes / element,
                                    nccl_type(plan.wire), plan.op, static_cast<int>(rank),
                                    context.communicator->get(), context.stream.get()),
         group);
  }
  context.communicator->settle(context.site, group->end(), "ncclGroupEnd");
}

}  // namespace

void enqueue_alltoall(const LaunchContext& context, DataType dtype, std::span<const Piece> pieces) {
  const auto something = [](std::int64_t count) { return count != 0; };
  const auto moves = [&](const Piece& piece) {
    return moves_anything(piece) || std::any_of(piece.sends.begin(), piece.sends.end(), something);
  };
  if (std::none_of(pieces.begin(), pieces.end(), moves)) return;
  std::vector<CopyItem> own;
  context.in_order([&] {
    std::optional<Group> group;
    group.emplace(context.site);
    for (const Piece& piece : pieces) exchange(context, piece, element_bytes(dtype), group, own);
    context.communicator->settle(context.site, group->end(), "ncclGroupEnd");
  });
  copy(context, own, dtype, dtype, {});
}

void enqueue_reducescatter(const LaunchContext& context, const Reduction& reduction,
                           std::span<const Piece> pieces) {
  const auto full = [](const Piece& piece) { return piece.count != 0; };
  const auto fulls = std::count_if(pieces.begin(), pieces.end(), full);
  if (fulls == 0) return;
  const auto& first = *std::find_if(pieces.begin(), pieces.end(), full);
  const auto self = static_cast<std::size_t>(context.rank);
  ReductionPlan plan = plan_reduction(reduction, context.ranks, context.sums_only);
  // Where NCCL only sums, for switches: a division before the sum would need the input packed, and
  // only Float16 may overflow without.
  if (plan.type != DataType::Float16) plan.after.divisor *= std::exchange(plan.before.divisor, 1);
  if (fulls == 1 && equal_counts(first) && plan.wire == plan.type && plan.before.none()) {
    const std::int64_t count = first.counts[self] * plan.lanes;
    context.in_order([&] {
      reduce_scatter(context, context, first.input, first.output, static_cast<std::size_t>(count),
                     plan);
    });
    return scale(context, first.output, count, plan.type, plan.after);
  }
  std::vector<std::vector<Piece>> by_rank(static_cast<std::size_t>(context.ranks));
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    for (const Piece& piece : pieces)
      by_rank[rank].push_back(part_of(piece, rank, element_bytes(reduction.dtype)));
  const Parts parts =
      lay_out_parts(by_rank, element_bytes(plan.wire) * static_cast<std::size_t>(plan.lanes));
  std::byte* buffer = context.fusion.reserve(context.site, parts.starts.back(), context.stream,
                                             context.communicators());
  std::vector<CopyItem> packed;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    append_packing(packed, parts.layouts[rank], plan.lanes, buffer + parts.starts[rank]);
  copy(context, packed, plan.type, plan.wire, plan.before);
  context.in_order([&] { reduce_parts(context, plan, buffer, parts); });
  unpack(context, parts.layouts[self], plan.lanes, buffer + parts.starts[self], plan.wire,
         plan.type, plan.after);
}

}  // namespace hvd::gpu
