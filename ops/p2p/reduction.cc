#include "ops/p2p/reduction.h"

#include <bit>
#include <utility>

#include "ops/host_ops.h"

namespace hvd {

ReductionPlan plan_reduction(const Batch& batch, const Arrangement& who) {
  const BatchTraits& traits = batch.traits;
  const bool average = traits.op == ReduceOp::Average;
  ReductionPlan plan;
  for (const auto& ranks : who.domains) plan.most_ranks = std::max(plan.most_ranks, ranks.size());
  plan.raw =
      plan.most_ranks == 1 || who.domains.size() == 1 || (average && is_integer(traits.dtype));
  plan.with_zeros =
      batch.ranks.size() < traits.set->ranks.size() && !zeros_change_nothing(traits.op);
  plan.across = reduction_of(traits);
  if (plan.raw) {
    for (const int rank : batch.ranks)
      for (std::size_t domain = 0; domain < who.domains.size(); ++domain) {
        const auto& ranks = who.domains[domain];
        const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
        if (found != ranks.end() && *found == rank)
          plan.fold.emplace_back(domain, static_cast<std::size_t>(found - ranks.begin()));
      }
    return plan;
  }
  plan.here = {traits.dtype, average ? ReduceOp::Sum : traits.op, traits.prescale_factor, 1, 1,
               traits.dtype};
  plan.across.prescale = 1;
  if (traits.dtype == DataType::Float16 && (average || traits.op == ReduceOp::Sum)) {
    const auto scale = static_cast<double>(std::bit_ceil(plan.most_ranks));
    plan.here.prescale = 1;
    plan.here.postscale = 1 / scale;
    plan.across.prescale = scale * traits.prescale_factor;
  }
  return plan;
}

ReducingExecution::ReducingExecution(P2pContext& context, Batch batch)
    : P2pExecution(context, std::move(batch)), plan_(plan_reduction(batch_, who_)) {}

void ReducingExecution::contribute(const Elements& elements, Range range, std::byte* to) {
  elements.flat.each(
      range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
        const auto& member = batch_.members[index];
        const std::size_t skipped = (elements.starts[index] + first) * element_;
        if (plan_.raw) {
          for (std::size_t place = 0; place < ranks_here(); ++place)
            std::memcpy(to + (place * range.size() + before) * element_,
                        input(member, place) + skipped, count * element_);
          return;
        }
        in_.clear();
        for (std::size_t place = 0; place < ranks_here(); ++place)
          in_.push_back(input(member, place) + skipped);
        out_.assign(1, to + before * element_);
        kernels::reduce(plan_.here, in_, out_, count);
      });
}

const std::byte* ReducingExecution::zeros(std::size_t bytes) {
  if (zeros_.size() < bytes) zeros_.resize(bytes);
  return zeros_.data();
}

}  // namespace hvd
