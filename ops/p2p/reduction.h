#pragma once
/// A ReductionPlan says how the values of ranks in several domains become one, element by element:
/// what a domain contributes, and how the contributions are combined. It is the same for all
/// operations that reduce, so that a reducescatter gives the bits of an allreduce. The order of
/// summing depends on nothing but the ranks and their domains: ((ranks of domain 0) + (ranks of
/// domain 1)) + ... float16 and bfloat16: what a domain of several ranks contributes is rounded to
/// the type for the wire, so the result is rounded twice; float16 contributions to sums are divided
/// by a power of two on the way, so that none overflows, and multiplied by it and by the prescale
/// factor in float32 where they are combined (a factor above 1 saves no value that is too small for
/// the type). Where a plan is raw, contributions are the ranks' own
/// inputs, combined in rank order and rounded once, as within one domain. That is where no domain
/// has two ranks, and for averages of integers, whose exact sums do not fit into the type; there a
/// domain of k ranks sends k times the data. The values of ranks that have joined are zeros. One
/// zero stands for all of them, as the last; where it changes nothing there is none.
// Tested in tests/ops/p2p/reduce_execution_test.cc

#include "ops/kernels/reduce.h"
#include "ops/p2p/execution.h"

namespace hvd {

struct ReductionPlan {
  bool raw = true;
  kernels::Reduction here;    ///< of the ranks' inputs to what their domain contributes; unless raw
  kernels::Reduction across;  ///< of what the domains contribute
  bool with_zeros = false;
  std::size_t most_ranks = 1;                             ///< of a domain
  std::vector<std::pair<std::size_t, std::size_t>> fold;  ///< raw: (domain, place) by rank
};

ReductionPlan plan_reduction(const Batch& batch, const Arrangement& who);

class ReducingExecution : public P2pExecution {
 protected:
  ReducingExecution(P2pContext& context, Batch batch);

  /// Arrays in what a domain contributes.
  [[nodiscard]] std::size_t arrays(std::size_t domain) const {
    return plan_.raw ? who_.domains[domain].size() : 1;
  }
  /// Writes this domain's contribution to `range`: raw, its ranks' inputs one after the other;
  /// otherwise their reduction.
  void contribute(const Elements& elements, Range range, std::byte* to);

  /// Combines the domains' contributions to `range`, `from[d]` being that of domain d; raw, that of
  /// this domain is not looked at. `add_outputs(member, first, before)` adds to `out_` where a run
  /// belongs that begins with element `first` of the member's part; `before`: elements of the range
  /// that came before.
  template <class AddOutputs>
  void combine(const Elements& elements, Range range, std::span<const std::byte* const> from,
               AddOutputs&& add_outputs) {
    elements.flat.each(
        range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
          const auto& member = batch_.members[index];
          const std::size_t element = elements.starts[index] + first;
          in_.clear();
          if (plan_.raw) {
            for (const auto& [domain, place] : plan_.fold)
              in_.push_back(domain == who_.self_domain
                                ? input(member, place) + element * element_
                                : from[domain] + (place * range.size() + before) * element_);
          } else {
            for (const std::byte* contribution : from)
              in_.push_back(contribution + before * element_);
          }
          if (plan_.with_zeros) in_.push_back(zeros(count * element_));
          out_.clear();
          add_outputs(member, first, before);
          kernels::reduce(plan_.across, in_, out_, count);
        });
  }

  const ReductionPlan plan_;
  std::vector<void*> out_;

 private:
  const std::byte* zeros(std::size_t bytes);

  std::vector<const void*> in_;
  std::vector<std::byte> zeros_;
};

}  // namespace hvd
