#pragma once
/// An AdasumExecution is Adasum across domains, tensor by tensor (kernels/adasum.h). The ranks of a
/// domain are combined in its arena, a tensor by whichever rank claims it. Then the leaders, the
/// first ranks of the domains, combine the domains' results in pairs of neighbours, the results
/// again in pairs: a binomial tree, at whose root, domain 0, the result comes to be. Ranks and
/// domains that have joined keep their places among the pairs, as zeros: the other of the pair goes
/// on, for both. The result goes back down the same tree, and in every domain the other ranks copy
/// it from their leader's blocks. A leader sends and receives whole tensors: 2 (h-1) times the data
/// leave all h domains together, and a result is there after 2 log2(h) of those. Every intermediate
/// result is rounded to the tensor's type. prescale multiplies the inputs, postscale the result. In
/// the batch's state, `next_chunk` counts claimed tensors, `finished` counts tensors that are
/// combined and then ranks that have copied, and `complete` says that the leader's blocks hold the
/// result.
// Tested in tests/ops/p2p/execution_test.cc

#include <array>
#include <optional>
#include <vector>

#include "ops/kernels/reduce.h"
#include "ops/p2p/chunks.h"
#include "ops/p2p/execution.h"

namespace hvd {

/// A PlaceAmongPairs is the place of a domain in the tree of pairs.
struct PlaceAmongPairs : TreePlace {
  /// How many ranks this domain's result stands for when it takes a child's, and that one; the
  /// nearest child first.
  std::vector<std::array<double, 2>> ranks;
};

class AdasumExecution final : public P2pExecution {
 public:
  AdasumExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::Adasum; }

 private:
  enum class Step { Combine, Gather, SendUp, HandDown, Wait };

  [[nodiscard]] bool leads() const { return who_.self_place == 0; }
  [[nodiscard]] bool is_root() const { return tree_.parent == who_.self_domain; }
  [[nodiscard]] ChunkedRun run(unsigned phase) const;
  [[nodiscard]] int leader_of(std::size_t domain) const { return who_.domains[domain].front(); }
  void pack(Range range, std::byte* to) const;
  void unpack(Range range, const std::byte* from);

  bool combine_here();
  bool gather();
  bool send_up();
  bool hand_down();
  /// Leader: does what can be done now.
  bool lead();

  const Flattened flat_;
  const Arrangement all_;  ///< with those who have joined
  const PlaceAmongPairs tree_;
  kernels::Reduction here_, across_;
  Step step_ = Step::Combine;
  bool claimed_all_ = false;
  std::size_t gathered_ = 0;  ///< children whose results are combined with this one
  std::span<std::byte> theirs_;
  std::optional<ChunkedReceive> from_child_;
  std::optional<ChunkedSend> to_parent_;
  std::optional<ChunkedReceive> from_parent_;
  std::optional<ChunkedSend> to_children_;
  std::size_t held_ = 0;  ///< elements of the result that have come down to this leader
};

}  // namespace hvd
