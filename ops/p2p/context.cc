#include "ops/p2p/context.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

std::vector<int> hosts_of(const Topology& topology) {
  std::vector<int> hosts;
  for (int rank = 0; rank < topology.size; ++rank) hosts.push_back(topology.host_of(rank));
  return hosts;
}

// Batches of one process set that may be under way at once; a domain has no room for more
// (BatchPlaces::kPlaces).
constexpr unsigned kMaxOrderBits = 12;
constexpr unsigned kMinOrderBits = 8;
constexpr unsigned kPhaseBits = 1;

}  // namespace

P2pContext::P2pContext(std::unique_ptr<PointToPoint> wire, Topology topology, DomainMemory memory,
                       std::shared_ptr<Arena> arena, Board& board,
                       std::shared_ptr<StatsCounters> stats)
    : topology_(std::move(topology)),
      staging_(std::move(memory), std::move(arena), topology_.domain_index),
      board_(board),
      stats_(std::move(stats)),
      exchange_(std::move(wire), hosts_of(topology_), leads()) {
  const unsigned bits =
      std::bit_width(static_cast<unsigned>(exchange_.wire().largest_tag()) + 1U) - 1U;
  order_bits_ = std::clamp((bits - kPhaseBits) / 2, kMinOrderBits, kMaxOrderBits);
  set_bits_ = bits - kPhaseBits - order_bits_;
}

Arrangement P2pContext::arrange(std::span<const int> ranks) const {
  return hvd::arrange(ranks, topology_.domain_of_rank, topology_.rank);
}

int P2pContext::tag(const Batch& batch, unsigned phase) const {
  const auto set = static_cast<std::uint64_t>(batch.traits.set->number);
  if (set >> set_bits_ != 0)
    throw BackendError(formatted("process set {}: the wire's tags are enough for {} sets at a time",
                                 batch.traits.set->id, std::uint64_t{1} << set_bits_));
  const std::uint64_t order = batch.order & ((std::uint64_t{1} << order_bits_) - 1);
  return static_cast<int>(((set << order_bits_ | order) << kPhaseBits) | phase);
}

}  // namespace hvd
