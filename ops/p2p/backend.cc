#include "ops/p2p/backend.h"

#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "hvd/routes.h"
#include "ops/host_ops.h"
#include "ops/p2p/adasum_execution.h"
#include "ops/p2p/allreduce_execution.h"
#include "ops/p2p/alltoall_execution.h"
#include "ops/p2p/copy_execution.h"
#include "ops/p2p/reducescatter_execution.h"

namespace hvd {

P2pBackend::P2pBackend(std::unique_ptr<PointToPoint> wire, Topology topology, DomainMemory memory, std::shared_ptr<Arena> arena,
                       Board& board, std::shared_ptr<StatsCounters> stats)
    : context_(std::move(wire), std::move(topology), std::move(memory), std::move(arena), board, std::move(stats)), direct_(context_) {}

bool P2pBackend::supports(const BatchTraits& traits) const { return traits.device.kind == DeviceKind::Cpu && host_supports(traits); }

std::uint64_t P2pBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const Arrangement who = context_.arrange(traits.set->ranks);
  if (who.alone()) return 0;
  const std::size_t bytes = static_cast<std::size_t>(member.count) * element_bytes(traits.dtype);
  Staging& staging = context_.staging();
  StatsCounters& stats = context_.stats();
  if (is_pulled(traits.kind)) {
    if (const auto place = staging.find(member.input)) {
      stats.add(stats.bytes_zero_copy, bytes);
      return *place;
    }
    if (routes::is_read_between_hosts(traits.kind, bytes))
      if (const auto place = staging.show(member.input, bytes)) return *place;
    member.copied = bytes > 0;
    return staging.stage(member.input, bytes);
  }
  const bool broadcast = traits.kind == OpKind::Broadcast;
  if (broadcast && BroadcastExecution::leader(who.here(), traits.root) != context_.rank()) return 0;
  const bool is_source = !broadcast || traits.root == context_.rank();
  if (const auto place = staging.find(member.output)) {
    member.copied = is_source && member.input != member.output && bytes > 0;
    if (member.copied) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats.add(stats.bytes_zero_copy, bytes);
    return *place;
  }
  member.copied = is_source && bytes > 0;
  return staging.stage(is_source ? member.input : nullptr, bytes);
}

void P2pBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept { context_.staging().release(location); }

std::unique_ptr<Execution> P2pBackend::launch(Batch batch) {
  if (aborted_) throw BackendError("the world has failed");
  switch (batch.traits.kind) {
    case OpKind::Allgather:
      return std::make_unique<AllgatherExecution>(context_, std::move(batch));
    case OpKind::Broadcast:
      return std::make_unique<BroadcastExecution>(context_, std::move(batch));
    case OpKind::Alltoall:
      return std::make_unique<AlltoallExecution>(context_, std::move(batch));
    case OpKind::Reducescatter:
      return std::make_unique<ReducescatterExecution>(context_, std::move(batch));
    default:
      if (batch.traits.op == ReduceOp::Adasum) return std::make_unique<AdasumExecution>(context_, std::move(batch));
      return std::make_unique<AllreduceExecution>(context_, std::move(batch));
  }
}

void P2pBackend::abort() noexcept {
  aborted_ = true;
  context_.exchange().abandon();
}

}  // namespace hvd
