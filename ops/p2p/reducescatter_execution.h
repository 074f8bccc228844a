#pragma once
/// A ReducescatterExecution is a reducescatter across domains: the first half of an allreduce (allreduce_execution.h), with the same bits.
/// For every rank that keeps elements, one rank of each other domain sends what its domain contributes to them, and the keeper combines the
/// domains' contributions right into its output. So a domain sends (h-1)/h of the data in all, the least possible (raw: k times that). The
/// ranks of a domain share the work by the keepers: keeper p of domain e is served by rank p + e, modulo their number.
/// In the batch's state, `finished` counts the ranks that have read what they need of their domain's blocks; until all have, these stay.

#include <deque>

#include "ops/p2p/chunks.h"
#include "ops/p2p/reduction.h"

namespace hvd {

class ReducescatterExecution final : public ReducingExecution {
 public:
  ReducescatterExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::Shares; }

 private:
  /// A rank elsewhere whose elements this rank contributes to.
  struct Keeper {
    Keeper(Requests& requests, const ChunkedRun& run, Elements of_keeper);
    ChunkedSend send;
    Elements elements;
  };
  /// What another domain contributes to this rank's elements.
  struct Source {
    Source(Requests& requests, const ChunkedRun& run, std::size_t of_domain);
    ChunkedReceive receive;
    std::size_t domain;
  };

  /// Returns the rank of domain `domain` that serves this keeper.
  [[nodiscard]] int server(std::size_t domain, std::size_t keeper_domain, std::size_t keeper_place) const;
  bool serve(Keeper& keeper);
  bool combine_next();

  Elements own_;
  std::size_t chunk_elements_ = 1;
  std::size_t combined_ = 0;               ///< of the own elements
  std::span<std::byte> own_contribution_;  ///< unless raw
  std::deque<Keeper> keepers_;             // stay where they are
  std::deque<Source> sources_;
  std::vector<const std::byte*> from_;  ///< per domain
  bool counted_ = false;
};

}  // namespace hvd
