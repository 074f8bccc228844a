#include "ops/p2p/backend.h"

#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "hvd/routes.h"
#include "ops/host_ops.h"
#include "ops/p2p/adasum_execution.h"
#include "ops/p2p/copy_execution.h"
#include "ops/p2p/reduce_execution.h"

namespace hvd {

P2pBackend::P2pBackend(std::unique_ptr<PointToPoint> wire, Topology topology, DomainMemory memory,
                       std::shared_ptr<Arena> arena, Board& board,
                       std::shared_ptr<StatsCounters> stats)
    : context_(std::move(wire), std::move(topology), std::move(memory), std::move(arena), board,
               std::move(stats)),
      direct_(context_) {}

bool P2pBackend::supports(const BatchTraits& traits) const {
  return traits.device.kind == DeviceKind::Cpu && host_supports(traits);
}

std::uint64_t P2pBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const Arrangement who = context_.arrange(traits.set->ranks);
  if (who.alone()) return 0;
  const std::size_t bytes = static_cast<std::size_t>(member.count) * element_bytes(traits.dtype);
  Staging& staging = context_.staging();
  StatsCounters& stats = context_.stats();
  if (routes::takes(traits.kind)) {
    if (traits.kind == OpKind::Broadcast && traits.root != context_.rank()) return 0;
    if (const auto place = staging.find(member.input)) {
      stats.add(stats.bytes_zero_copy, bytes);
      return *place;
    }
    const bool is_copied =
        routes::is_copied(traits.kind, bytes, who.here().size(), false, staging.staged_bytes());
    if (routes::is_read_between_hosts(traits.kind, bytes) && !is_copied)
      if (const auto place = staging.show(member.input, bytes)) return *place;
    member.copied = bytes > 0;
    return staging.stage(member.input, bytes);
  }
  if (const auto place = staging.find(member.output)) {
    member.copied = member.input != member.output && bytes > 0;
    if (member.copied) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats.add(stats.bytes_zero_copy, bytes);
    return *place;
  }
  member.copied = bytes > 0;
  return staging.stage(member.input, bytes);
}

void P2pBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept {
  context_.staging().release(location);
}

std::unique_ptr<Execution> P2pBackend::launch(Batch batch) {
  if (aborted_) throw BackendError("the world has failed");
  const auto& traits = batch.traits;
  if (traits.kind == OpKind::Allreduce && traits.op == ReduceOp::Adasum)
    return std::make_unique<AdasumExecution>(context_, std::move(batch));
  if (reduces(traits.kind)) return std::make_unique<ReduceExecution>(context_, std::move(batch));
  return std::make_unique<CopyExecution>(context_, std::move(batch));
}

bool P2pBackend::abort() noexcept {
  aborted_ = true;
  context_.exchange().abandon();
  return true;
}

}  // namespace hvd
