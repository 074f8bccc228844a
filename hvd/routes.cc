#include "hvd/routes.h"

#include <algorithm>

#include "hvd/stats.h"

namespace hvd {

namespace {

using Memory = RouteQuestion::Memory;
using Question = RouteQuestion;

static_assert(std::ranges::all_of(kLimits, [](const LimitRow& row) {
  return &row - kLimits.data() == static_cast<int>(row.limit);
}));

bool is_adasum(const Question& q) {
  return q.kind == OpKind::Allreduce && q.op == ReduceOp::Adasum;
}
std::size_t ranks_of_host(const Question& q) { return (q.ranks + q.hosts - 1) / q.hosts; }

std::size_t input_bytes(const Question& q) { return q.kind == OpKind::Barrier ? 0 : q.bytes; }
/// Returns the bytes that any rank's block has to hold.
std::size_t block_bytes(const Question& q) {
  return input_bytes(q) * (q.kind == OpKind::Allgather ? q.ranks : 1);
}

/// Returns the bytes that a host contributes. Integers' averages and hosts of one rank are folded
/// rank by rank, so that the bits are those of one host.
std::size_t contribution_bytes(const Question& q) {
  const bool is_raw = ranks_of_host(q) == 1 || (q.op == ReduceOp::Average && is_integer(q.dtype));
  const bool is_each =
      q.kind == OpKind::Allgather || q.kind == OpKind::Alltoall || (reduces(q.kind) && is_raw);
  return input_bytes(q) * (is_each ? ranks_of_host(q) : 1);
}

bool is_on_host(const Question& q) { return q.memory != Memory::Gpu; }
bool may_repeat(const Question& q) {
  return is_on_host(q) && q.repeats && !is_adasum(q) &&
         routes::may_repeat(q.kind, static_cast<std::int64_t>(input_bytes(q)));
}
bool is_at_slot(const Question& q) {
  return may_repeat(q) && q.hosts == 1 && routes::is_at_slot(block_bytes(q), q.hosts);
}
bool is_lent(const Question& q) {
  return may_repeat(q) && q.hosts == 1 && !routes::is_at_slot(block_bytes(q), q.hosts) &&
         routes::is_lent(q.kind, q.bytes, q.ranks);
}
bool is_direct(const Question& q) {
  return may_repeat(q) && q.hosts > 1 && routes::may_be_direct(q.hosts) &&
         routes::is_at_slot(block_bytes(q), q.hosts) &&
         routes::is_direct(q.kind, contribution_bytes(q), q.hosts);
}

/// A batch of host tensors.
bool is_batch(const Question& q) {
  return is_on_host(q) && !is_at_slot(q) && !is_lent(q) && !is_direct(q);
}

/// A batch within a host whose ranks take what they need.
bool is_taking(const Question& q) { return is_batch(q) && q.hosts == 1 && routes::takes(q.kind); }
bool is_copied(const Question& q) {
  if (routes::is_at_once(q.bytes)) return true;
  if (q.memory == Memory::Shared) return false;
  return !q.machine.reads_others ||
         routes::is_copied(q.kind, q.bytes, q.ranks, q.machine.is_slow, 0);
}
bool has_rings(const Question& q) {
  return q.memory != Memory::Shared && routes::relays(q.kind, q.bytes, q.ranks, q.machine) > 0;
}
template <Route Gpu>
bool is_by_gpu(const Question& q) {
  return q.memory == Memory::Gpu && q.machine.gpu.value_or(Route::Staged) == Gpu;
}

constexpr std::array<RouteRow, kRoutes> kRows{{
    {Route::AtSlot, "at the slot", "the rank that arrives last, for all",
     "repeated, and a block holds input and result", is_at_slot},
    {Route::EachItsPart, "each its part", "each rank, out of the others' inputs",
     "what ranks get differs, or is much: all share the work",
     [](const Question& q) { return is_lent(q) || is_taking(q); }},
    {Route::Claimed, "claimed chunks", "whichever rank claims a chunk",
     "a rank that is not scheduled holds nobody up",
     [](const Question& q) {
       return is_batch(q) && q.hosts == 1 && q.kind == OpKind::Allreduce && !is_adasum(q);
     }},
    {Route::Adasum, "claimed tensors", "whichever rank claims a tensor, then leaders in pairs",
     "Adasum looks at whole tensors",
     [](const Question& q) { return is_batch(q) && is_adasum(q); }},
    {Route::Direct, "leaders directly", "the leader of each host", "repeated and small: one hop",
     is_direct},
    {Route::Slices, "slices", "each rank of a host one slice", "all lines and cores are at work",
     [](const Question& q) {
       return is_batch(q) && q.hosts > 1 && reduces(q.kind) && !is_adasum(q);
     }},
    {Route::Streams, "streams", "who has it sends, leaders hand on and collect",
     "every byte reaches a host once",
     [](const Question& q) {
       return is_batch(q) && q.hosts > 1 && routes::takes(q.kind) && !reduces(q.kind);
     }},
    {Route::Nccl, "NCCL", "the GPUs", "a GPU for each rank", is_by_gpu<Route::Nccl>},
    {Route::SharedGpu, "shared GPU", "the GPU, one launch of each rank",
     "all ranks have the same GPU", is_by_gpu<Route::SharedGpu>},
    {Route::Staged, "staged", "the host, by one of its ways", "neither NCCL nor one GPU for all",
     is_by_gpu<Route::Staged>},
}};
static_assert(std::tuple_size_v<decltype(StatsCounters::routes)> >= kRoutes);
static_assert(std::tuple_size_v<decltype(StatsCounters::accesses)> >= kAccesses);
static_assert(std::ranges::all_of(kRows, [](const RouteRow& row) {
  return &row - kRows.data() == static_cast<int>(row.route);
}));

}  // namespace

std::span<const RouteRow, kRoutes> all_routes() { return kRows; }

std::optional<RouteChoice> choose(const RouteQuestion& question) {
  const auto* const row =
      std::ranges::find_if(kRows, [&](const RouteRow& one) { return one.takes(question); });
  if (row == kRows.end()) return std::nullopt;
  if (row->route != Route::EachItsPart) return RouteChoice{row->route};
  const auto by = [&](Access access) { return RouteChoice{row->route, access}; };
  if (is_lent(question)) return by(Access::Lent);
  if (is_copied(question)) return by(Access::Copied);
  return by(has_rings(question) ? Access::Ring : Access::Read);
}

std::string_view name_of(Route route) { return kRows[static_cast<std::size_t>(route)].name; }

std::string name_of(RouteChoice way) {
  static constexpr std::array<std::string_view, kAccesses> kNames{
      "", ": leased", ": copied in", ": read where it lies", ": through rings"};
  return std::string(name_of(way.route)).append(kNames[static_cast<std::size_t>(way.access)]);
}

}  // namespace hvd
