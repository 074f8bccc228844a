#pragma once
/// An AllreduceExecution is one allreduce across domains. The batch, flattened, is cut into slices, one for each of the first m ranks of
/// every domain, where m is the number of ranks of the smallest domain. The owner of a slice works through it in rounds, several of them
/// under way at once:
///
///   start    reduces the domain's inputs in rank order; part d of the round goes to the slice's owner in domain d
///   combine  the domains' contributions to this domain's part, in the domains' order; the result goes to all other owners of the slice
///   scatter  results of the other parts into the memory of all ranks of this domain
///
/// so a domain sends 2(h-1)/h of the data to the h-1 others, the least possible (raw: k times the data in the first step). Small batches
/// skip the last step; there one owner per domain sends its contribution to all others, and each combines the whole.
/// The arithmetic is that of reduction.h, the same for batches of all sizes.

#include <array>

#include "ops/p2p/reduction.h"

namespace hvd {

class AllreduceExecution final : public ReducingExecution {
 public:
  AllreduceExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return small_ ? Route::OneStep : Route::Slices; }

 private:
  static constexpr std::size_t kWindow = 16;  ///< rounds under way at once
  struct Peer {                               ///< the owner of the slice in another domain
    std::size_t domain;
    int rank;
    std::size_t inputs;  ///< arrays in its contribution
  };
  /// A Slot is a place for a round that is under way.
  struct Slot {
    std::span<std::byte> outgoing;             ///< contributions, per peer (one for all where the batch is small)
    std::span<std::byte> own;                  ///< contribution to this domain's part, unless raw
    std::span<std::byte> result;               ///< of this domain's part
    std::vector<std::span<std::byte>> inputs;  ///< contributions of each peer to this domain's part
    std::vector<std::span<std::byte>> parts;   ///< results of each peer's part
    std::size_t sending = 0, awaited_inputs = 0, awaited_parts = 0;
  };

  void plan_rounds();
  [[nodiscard]] Slot make_slot();
  [[nodiscard]] Range round(std::size_t number) const;
  /// Returns what domain `domain` combines in this round.
  [[nodiscard]] Range part(std::size_t number, std::size_t domain) const;
  void start(std::size_t number);
  void combine(std::size_t number);
  void scatter(std::size_t number);
  bool work();
  void finish_slice();

  const Elements all_;
  bool small_ = false;
  std::size_t own_inputs_ = 1;  ///< arrays in this domain's contribution
  std::vector<Peer> peers_;
  std::size_t owners_ = 1;  ///< slices of the domain
  bool owner_ = false;
  Range slice_;
  std::size_t part_elements_ = 0;  ///< of a full round
  std::size_t rounds_ = 0;
  std::array<Slot, kWindow> slots_;
  std::size_t slots_made_ = 0;
  std::size_t started_ = 0, combined_ = 0, scattered_ = 0;
  bool counted_ = false;
  std::vector<const std::byte*> from_;  ///< per domain
};

}  // namespace hvd
