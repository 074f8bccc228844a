// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc
#include "ops/gpu/nccl/collectives.h"

#include <algorithm>
#include <functional>

#include "hvd/types.h"

namespace hvd::gpu {

void LaunchOrder::begin(const CallContext& site, const Stream& stream) {
  if (!last_) last_.emplace(site);
  if (of_ != nullptr && of_ != &stream) check(site, site.table->stream_wait_event(stream.get(), last_->get()), "cudaStreamWaitEvent");
}

void LaunchOrder::end(const CallContext& site, const Stream& stream) {
  last_->record(site, stream);
  of_ = &stream;
}

std::vector<std::shared_ptr<Communicator>> LaunchContext::communicators() const {
  if (levels) return {levels->host.communicator, levels->across.communicator};
  return communicator ? std::vector{communicator} : std::vector<std::shared_ptr<Communicator>>{};
}

ReductionPlan LaunchContext::plan(const Reduction& reduction) const {
  const bool travels = ranks > 1 || reduction.joined > 0;
  const bool multiplies = travels && site.table->op_create;
  return plan_reduction(reduction, ranks, sums_only ? NcclScales::Nothing : multiplies ? NcclScales::All : NcclScales::Averages);
}

PlannedOp::PlannedOp(const LaunchContext& context, const CommGroup& comm_group, const ReductionPlan& plan)
    : context_(context), communicator_(*comm_group.communicator), op_(plan.op), made_(plan.premultiplied != 1) {
  if (!made_) return;
  const NcclCode code = context.site.table->op_create(&op_, plan.premultiplied, nccl_type(plan.wire), communicator_.get());
  communicator_.settle(context.site, code, "ncclRedOpCreatePreMulSum");
}

void PlannedOp::settle(NcclCode code, std::string_view call) const {
  communicator_.settle(context_.site, code, call);
  if (made_) communicator_.settle(context_.site, context_.site.table->op_destroy(op_, communicator_.get()), "ncclRedOpDestroy");
}

std::size_t bytes_of(std::int64_t count, std::size_t element) { return static_cast<std::size_t>(count) * element; }

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

void copy(const LaunchContext& context, const std::vector<CopyItem>& items, DataType from, DataType to, const Scaling& scaling) {
  if (items.empty()) return;
  const CopyJob job{.items = items, .from = from, .to = to, .factor = scaling.factor, .divisor = scaling.divisor};
  check(context.site, context.site.table->batched_copy(job, context.stream.get()), "launch_batched_copy");
}

void scale(const LaunchContext& context, void* values, std::int64_t count, DataType type, const Scaling& scaling) {
  if (!scaling.none()) copy(context, {{values, values, count}}, type, type, scaling);
}

void append_packing(std::vector<CopyItem>& items, const Layout& layout, int lanes, std::byte* buffer) {
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    items.push_back({layout.pieces[i]->input, buffer + layout.offsets[i], layout.pieces[i]->count * lanes});
  }
}

void pack(const LaunchContext& context, const Layout& layout, int lanes, std::byte* buffer, DataType from, DataType wire,
          const Scaling& scaling) {
  std::vector<CopyItem> items;
  append_packing(items, layout, lanes, buffer);
  copy(context, items, from, wire, scaling);
}

void unpack(const LaunchContext& context, const Layout& layout, int lanes, const std::byte* buffer, DataType wire, DataType to,
            const Scaling& scaling) {
  std::vector<CopyItem> items;
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    items.push_back({buffer + layout.offsets[i], layout.pieces[i]->output, layout.pieces[i]->count * lanes});
  }
  copy(context, items, wire, to, scaling);
}

void reduce_scatter(const LaunchContext& context, const CommGroup& comm_group, const void* send, void* receive, std::size_t count,
                    const ReductionPlan& plan) {
  const PlannedOp op(context, comm_group, plan);
  const NcclCode code = context.site.table->reduce_scatter(send, receive, count, nccl_type(plan.wire), op.get(),
                                                           comm_group.communicator->get(), context.stream.get());
  op.settle(code, "ncclReduceScatter");
}

void move(const LaunchContext& context, std::string_view call, NcclCode code, const std::optional<Group>& group) {
  if (!group) return context.communicator->settle(context.site, code, call);
  if (code != NcclCode::InProgress) check(context.site, code, call, context.communicator->get());  // settled at the group's end
}

bool equal_counts(const Piece& piece) {
  return std::adjacent_find(piece.counts.begin(), piece.counts.end(), std::not_equal_to<>()) == piece.counts.end();
}

bool moves_anything(const Piece& piece) {
  return std::any_of(piece.counts.begin(), piece.counts.end(), [](std::int64_t count) { return count != 0; });
}

}  // namespace hvd::gpu
