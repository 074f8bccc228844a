#pragma once
/// Room card: one allreduce across domains. The batch, flattened, is cut into slices, one for each of the first m ranks of every domain (m:
/// the ranks of the smallest domain). The owner of a slice works through it in rounds, several of them under way at once:
///
///   start    reduces the domain's inputs in rank order; part d of the round goes to the slice's owner in domain d
///   combine  the domains' contributions to this domain's part, in the domains' order; the result goes to all other owners of the slice
///   scatter  results of the other parts into the memory of all ranks of this domain
///
/// so a domain sends 2(h-1)/h of the data to the h-1 others, the least possible. Small batches skip the last step: one owner per domain
/// sends its contribution to all others, and each combines the whole. The order of summing is the same in both, and depends on nothing
/// but the ranks and their domains: ((ranks of domain 0) + (ranks of domain 1)) + ...
/// float16 and bfloat16: what a domain of several ranks contributes is rounded to the type for the wire, so the result is rounded twice;
/// float16 contributions to sums are scaled by a power of two on the way, so that they overflow only where a mean would.
/// Raw: contributions are the ranks' own inputs, combined in rank order and rounded once, as within one domain. That is where no domain
/// has two ranks, and for averages of integers, whose exact sums do not fit into the type; there a domain of k ranks sends k times the
/// data in the first step.

#include <array>

#include "ops/kernels/reduce.h"
#include "ops/mpi_execution.h"

namespace hvd {

class AllreduceExecution final : public MpiExecution {
 public:
  AllreduceExecution(MpiBackend& backend, Batch batch);
  Progress advance() override;

 private:
  static constexpr std::size_t kWindow = 4;  ///< rounds under way at once
  struct Peer {                              ///< the owner of the slice in another domain
    std::size_t domain;
    int rank;
    std::size_t inputs;  ///< arrays in its contribution
  };
  /// A place for a round under way.
  struct Slot {
    std::span<std::byte> outgoing;             ///< contributions, per peer (one for all where the batch is small)
    std::span<std::byte> own;                  ///< contribution to this domain's part, unless raw
    std::span<std::byte> result;               ///< of this domain's part
    std::vector<std::span<std::byte>> inputs;  ///< contributions of each peer to this domain's part
    std::vector<std::span<std::byte>> parts;   ///< results of each peer's part
    std::size_t sending = 0, awaited_inputs = 0, awaited_parts = 0;
  };

  void plan_reductions(std::size_t most_ranks);
  void plan_rounds(std::size_t most_ranks);
  [[nodiscard]] Slot make_slot();
  [[nodiscard]] Range round(std::size_t number) const;
  /// What domain `domain` combines in this round.
  [[nodiscard]] Range part(std::size_t number, std::size_t domain) const;
  [[nodiscard]] const std::byte* input(const BatchMember& member, std::size_t place) const;
  [[nodiscard]] std::byte* output(const BatchMember& member, std::size_t place) const;

  void contribute(Range range, std::byte* to);
  void start(std::size_t number);
  void combine(std::size_t number);
  void scatter(std::size_t number);
  bool work();
  void finish_slice();

  const Flattened flat_;
  bool raw_ = true;
  bool small_ = false;
  kernels::Reduction here_, across_;
  std::size_t own_inputs_ = 1;  ///< arrays in this domain's contribution
  std::vector<Peer> peers_;
  std::vector<std::pair<std::size_t, std::size_t>> fold_;  ///< raw: (domain, place) of the set's ranks in their order
  std::size_t owners_ = 1;                                 ///< slices of the domain
  bool owner_ = false;
  Range slice_;
  std::size_t part_elements_ = 0;  ///< of a full round
  std::size_t rounds_ = 0;
  std::array<Slot, kWindow> slots_;
  std::size_t slots_made_ = 0;
  std::size_t started_ = 0, combined_ = 0, scattered_ = 0;
  bool counted_ = false;
  std::vector<const void*> in_;
  std::vector<void*> out_;
};

}  // namespace hvd
