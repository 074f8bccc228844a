#include "hvd/routes.h"

#include <algorithm>

#include "hvd/stats.h"

namespace hvd {

namespace {

using Memory = RouteQuestion::Memory;
using Question = RouteQuestion;

static_assert(std::ranges::all_of(kLimits, [](const LimitRow& row) { return &row - kLimits.data() == static_cast<int>(row.limit); }));

bool is_adasum(const Question& q) { return q.kind == OpKind::Allreduce && q.op == ReduceOp::Adasum; }
std::size_t ranks_of_host(const Question& q) { return (q.ranks + q.hosts - 1) / q.hosts; }

std::size_t input_bytes(const Question& q) { return q.kind == OpKind::Barrier ? 0 : q.bytes; }
/// What any rank's block has to hold.
std::size_t block_bytes(const Question& q) { return input_bytes(q) * (q.kind == OpKind::Allgather ? q.ranks : 1); }

/// What a host contributes. Integers' averages and hosts of one rank are folded rank by rank, so that the bits are those of one host.
std::size_t contribution_bytes(const Question& q) {
  const bool is_raw = ranks_of_host(q) == 1 || (q.op == ReduceOp::Average && is_integer(q.dtype));
  const bool is_each = q.kind == OpKind::Allgather || (q.kind == OpKind::Allreduce && is_raw);
  return input_bytes(q) * (is_each ? ranks_of_host(q) : 1);
}

bool is_on_host(const Question& q) { return q.memory != Memory::Gpu; }
bool may_repeat(const Question& q) {
  return is_on_host(q) && q.repeats && !is_adasum(q) && routes::may_repeat(q.kind, static_cast<std::int64_t>(input_bytes(q)));
}
bool is_at_slot(const Question& q) { return may_repeat(q) && q.hosts == 1 && routes::is_at_slot(block_bytes(q)); }
bool is_lent(const Question& q) {
  return may_repeat(q) && q.hosts == 1 && !routes::is_at_slot(block_bytes(q)) && routes::is_lent(q.kind, q.bytes, q.ranks);
}
bool is_direct(const Question& q) {
  return may_repeat(q) && q.hosts > 1 && routes::may_be_direct(q.kind, q.hosts) && routes::is_at_slot(block_bytes(q)) &&
         routes::is_direct(contribution_bytes(q), q.hosts);
}

/// A batch of host tensors: with so many hosts or one, of this kind.
bool is_batch(const Question& q, OpKind kind, bool between_hosts) {
  return is_on_host(q) && q.kind == kind && (q.hosts > 1) == between_hosts && !is_at_slot(q) && !is_lent(q) && !is_direct(q);
}

/// A batch within a host whose ranks take what they need.
bool is_taking(const Question& q) { return routes::takes(q.kind) && is_batch(q, q.kind, false); }
bool is_copied(const Question& q) {
  if (routes::is_at_once(q.bytes)) return true;
  if (q.memory == Memory::Shared) return false;
  return !q.machine.reads_others || routes::is_copied(q.kind, q.bytes, q.ranks, q.machine.is_slow, 0);
}
bool is_relayed(const Question& q) {
  return q.memory != Memory::Shared && !is_copied(q) && routes::relays(q.kind, q.bytes, q.ranks, q.machine) > 0;
}
bool is_one_step(const Question& q) { return routes::is_one_step(contribution_bytes(q), q.hosts); }

/// The children of the root of a binomial tree (ops/partition.h).
std::size_t children_of_root(std::size_t hosts) {
  std::size_t children = 0;
  while ((std::size_t{1} << children) < hosts) ++children;
  return children;
}
bool is_chain(const Question& q) {
  const std::size_t element = element_bytes(q.dtype), elements = q.bytes / element;
  const std::size_t piece = routes::broadcast_piece(elements * element) / element;
  return routes::is_chain((elements + piece - 1) / piece, q.hosts, children_of_root(q.hosts));
}

template <OpKind Kind>
bool is_between(const Question& q) {
  return is_batch(q, Kind, true);
}
template <Route Gpu>
bool is_by_gpu(const Question& q) {
  return q.memory == Memory::Gpu && q.machine.gpu.value_or(Route::Staged) == Gpu;
}

constexpr std::array<RouteRow, kRoutes> kRows{{
    {Route::AtSlot, "at the slot", "the rank that arrives last, for all", "repeated, and a block holds input and result", is_at_slot},
    {Route::EachItsPart, "each its part", "each rank, out of blocks lent for the round", "repeated, and large enough to share the work",
     is_lent},
    {Route::Agreed, "agreement alone", "whoever completes the agreement", "nothing is to be moved",
     [](const Question& q) { return is_batch(q, OpKind::Barrier, false) || is_batch(q, OpKind::Barrier, true); }},
    {Route::Claimed, "claimed chunks", "whichever rank claims a chunk", "a rank that is not scheduled holds nobody up",
     [](const Question& q) { return is_batch(q, OpKind::Allreduce, false) && !is_adasum(q); }},
    {Route::Adasum, "claimed tensors", "whichever rank claims a tensor", "Adasum looks at whole tensors",
     [](const Question& q) { return is_batch(q, OpKind::Allreduce, false) && is_adasum(q); }},
    {Route::Copied, "copied in", "each owner copies in, each rank takes what it needs",
     "the owner need not wait for its readers, or reading costs more", [](const Question& q) { return is_taking(q) && is_copied(q); }},
    {Route::Read, "read where it lies", "each rank takes what it needs from the others' memory", "one copy instead of two",
     [](const Question& q) { return is_taking(q) && !is_copied(q) && !is_relayed(q); }},
    {Route::Relayed, "through rings", "owners copy ahead of their readers", "both sides work, and plain copies are the faster ones",
     [](const Question& q) { return is_taking(q) && is_relayed(q); }},
    {Route::Direct, "leaders directly", "the leader of each host", "repeated and small: one hop", is_direct},
    {Route::OneStep, "one step", "the first rank of each host", "little is sent: one step is better than two",
     [](const Question& q) { return is_between<OpKind::Allreduce>(q) && !is_adasum(q) && is_one_step(q); }},
    {Route::Slices, "slices", "each rank of a host one slice", "all lines and cores are at work",
     [](const Question& q) { return is_between<OpKind::Allreduce>(q) && !is_adasum(q) && !is_one_step(q); }},
    {Route::Tree, "tree of leaders", "the leader of each host", "one piece, or two hosts: fewest hops",
     [](const Question& q) { return is_between<OpKind::Broadcast>(q) && !is_chain(q); }},
    {Route::Chain, "chain of leaders", "the leader of each host", "each piece goes over each line once",
     [](const Question& q) { return is_between<OpKind::Broadcast>(q) && is_chain(q); }},
    {Route::ToLeaders, "to the leaders", "each rank sends, the leader collects, each rank copies", "each input crosses to a host once",
     is_between<OpKind::Allgather>},
    {Route::Pairs, "pairs", "each rank", "each part has one reader", is_between<OpKind::Alltoall>},
    {Route::Shares, "shares", "a rank of each host reduces for each rank", "each share crosses once from each host",
     is_between<OpKind::Reducescatter>},
    {Route::AdasumAcross, "Adasum between hosts", "the ranks of each host", "sums within a host, Adasum between them",
     [](const Question& q) { return is_between<OpKind::Allreduce>(q) && is_adasum(q); }},
    {Route::Nccl, "NCCL", "the GPUs", "a GPU for each rank", is_by_gpu<Route::Nccl>},
    {Route::SharedGpu, "shared GPU", "the GPU, one launch of each rank", "all ranks have the same GPU", is_by_gpu<Route::SharedGpu>},
    {Route::Staged, "staged", "the host, by one of its ways", "neither NCCL nor one GPU for all", is_by_gpu<Route::Staged>},
}};
static_assert(std::tuple_size_v<decltype(StatsCounters::routes)> >= kRoutes);
static_assert(std::ranges::all_of(kRows, [](const RouteRow& row) { return &row - kRows.data() == static_cast<int>(row.route); }));

}  // namespace

std::span<const RouteRow, kRoutes> all_routes() { return kRows; }

const RouteRow& choose(const RouteQuestion& question) {
  return *std::ranges::find_if(kRows, [&](const RouteRow& row) { return row.takes(question); });
}

std::string_view name_of(Route route) { return kRows[static_cast<std::size_t>(route)].name; }

}  // namespace hvd
