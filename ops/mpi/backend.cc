#include "ops/mpi/backend.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/host_ops.h"
#include "ops/mpi/adasum_execution.h"
#include "ops/mpi/allreduce_execution.h"
#include "ops/mpi/alltoall_execution.h"
#include "ops/mpi/copy_execution.h"
#include "ops/mpi/reducescatter_execution.h"

namespace hvd {

namespace {

std::vector<int> hosts_of(const Topology& topology) {
  std::vector<int> hosts;
  for (int rank = 0; rank < topology.size; ++rank) hosts.push_back(topology.host_of(rank));
  return hosts;
}

// Batches of one process set that may be under way at once; a domain has no room for more (Board::kBatchPlaces).
constexpr unsigned kMaxOrderBits = 12;
constexpr unsigned kMinOrderBits = 8;
constexpr unsigned kPhaseBits = 1;

}  // namespace

MpiBackend::MpiBackend(MpiComm comm, Topology topology, DomainMemory memory, std::shared_ptr<Arena> arena, Board& board,
                       std::shared_ptr<StatsCounters> stats)
    : topology_(std::move(topology)),
      staging_(std::move(memory), std::move(arena), topology_.domain_index),
      board_(board),
      stats_(std::move(stats)),
      exchange_(std::move(comm), hosts_of(topology_)) {
  const unsigned bits = std::bit_width(static_cast<unsigned>(exchange_.comm().largest_tag()) + 1U) - 1U;
  order_bits_ = std::clamp((bits - kPhaseBits) / 2, kMinOrderBits, kMaxOrderBits);
  set_bits_ = bits - kPhaseBits - order_bits_;
}

Arrangement MpiBackend::arrange(std::span<const int> ranks) const { return hvd::arrange(ranks, topology_.domain_of_rank, topology_.rank); }

int MpiBackend::domain_index(int rank) const {
  const auto& ranks = topology_.domain_ranks;
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int MpiBackend::tag(const Batch& batch, unsigned phase) const {
  const auto set = static_cast<std::uint64_t>(batch.traits.set->number);
  if (set >> set_bits_ != 0)
    throw BackendError(
        formatted("process set {}: this MPI's tags are enough for {} sets at a time", batch.traits.set->id, std::uint64_t{1} << set_bits_));
  const std::uint64_t order = batch.order & ((std::uint64_t{1} << order_bits_) - 1);
  return static_cast<int>(((set << order_bits_ | order) << kPhaseBits) | phase);
}

bool MpiBackend::supports(const BatchTraits& traits) const { return traits.device.kind == DeviceKind::Cpu && host_supports(traits); }

std::uint64_t MpiBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const Arrangement who = arrange(traits.set->ranks);
  if (who.alone()) return 0;
  const std::size_t bytes = static_cast<std::size_t>(member.count) * element_bytes(traits.dtype);
  if (is_pulled(traits.kind)) {
    if (const auto place = staging_.find(member.input)) {
      stats_->add(stats_->bytes_zero_copy, bytes);
      return *place;
    }
    member.copied = bytes > 0;
    return staging_.stage(member.input, bytes);
  }
  const bool broadcast = traits.kind == OpKind::Broadcast;
  if (broadcast && BroadcastExecution::leader(who.here(), traits.root) != topology_.rank) return 0;
  const bool is_source = !broadcast || traits.root == topology_.rank;
  if (const auto place = staging_.find(member.output)) {
    member.copied = is_source && member.input != member.output && bytes > 0;
    if (member.copied) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats_->add(stats_->bytes_zero_copy, bytes);
    return *place;
  }
  member.copied = is_source && bytes > 0;
  return staging_.stage(is_source ? member.input : nullptr, bytes);
}

void MpiBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept { staging_.release(location); }

std::unique_ptr<Execution> MpiBackend::launch(Batch batch) {
  if (aborted_) throw BackendError("the world has failed");
  switch (batch.traits.kind) {
    case OpKind::Allgather:
      return std::make_unique<AllgatherExecution>(*this, std::move(batch));
    case OpKind::Broadcast:
      return std::make_unique<BroadcastExecution>(*this, std::move(batch));
    case OpKind::Alltoall:
      return std::make_unique<AlltoallExecution>(*this, std::move(batch));
    case OpKind::Reducescatter:
      return std::make_unique<ReducescatterExecution>(*this, std::move(batch));
    default:
      if (batch.traits.op == ReduceOp::Adasum) return std::make_unique<AdasumExecution>(*this, std::move(batch));
      return std::make_unique<AllreduceExecution>(*this, std::move(batch));
  }
}

void MpiBackend::abort() noexcept {
  aborted_ = true;
  exchange_.abandon();
}

}  // namespace hvd
