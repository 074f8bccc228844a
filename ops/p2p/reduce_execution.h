#pragma once
/// A ReduceExecution is one allreduce or reducescatter across domains. Every element has a keeper:
/// of each other domain one rank, its server, sends the keeper what that domain contributes, and
/// the keeper combines the domains' contributions. Both work in chunks, several of them under way
/// at once. What differs is who keeps what, and who gets the result:
///
///   reducescatter     each rank keeps its own part, in its output. The ranks of a domain share the
///                     serving: keeper p of domain e is served by rank p + e, modulo their number
///   allreduce         the first m ranks of every domain, where m is the number of ranks of the
///                     smallest, have a slice each, and of it their domain's part; rank p serves
///                     the keepers p. A keeper sends its results to all other keepers of its slice,
///                     and each writes what it gets into the memory of all ranks of its domain
///   small allreduce   the first rank of every domain keeps everything, so there are no results to
///                     be sent
///
/// so a domain sends (h-1)/h of the data to the h-1 others, twice for an allreduce, the least
/// possible (raw: k times the data in the first step). The arithmetic is that of reduction.h, the
/// same for batches of all sizes, so a reducescatter gives the bits of an allreduce. In the batch's
/// state, `finished` counts the keepers of the domain that have done all of this; until all have,
/// its blocks stay.

#include <deque>
#include <memory>
#include <optional>

#include "ops/p2p/chunks.h"
#include "ops/p2p/reduction.h"

namespace hvd {

class ReduceExecution final : public ReducingExecution {
 public:
  ReduceExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::Slices; }

 private:
  /// The elements that one rank keeps.
  struct Part {
    std::shared_ptr<const Elements> elements;
    Range range;
    /// Returns where a run of it lies among the elements.
    [[nodiscard]] Range at(Range run) const {
      return {range.begin + run.begin, range.begin + run.end};
    }
  };
  /// A rank elsewhere that this rank serves.
  struct Keeper {
    Keeper(Requests& requests, const ChunkedRun& run, int rank, SendMode mode, Part of_keeper);
    ChunkedSend send;
    Part part;
  };
  /// The contribution of another domain to this rank's part.
  struct Source {
    Source(Requests& requests, const ChunkedRun& run, int rank, std::size_t of_domain);
    ChunkedReceive receive;
    std::size_t domain;
  };
  /// Results of another keeper of the slice.
  struct Result {
    Result(Requests& requests, const ChunkedRun& run, int rank, Part of_keeper);
    ChunkedReceive receive;
    Part part;
  };

  [[nodiscard]] bool scatters() const { return batch_.traits.kind == OpKind::Reducescatter; }
  /// Returns how many ranks of a domain keep something, and serve.
  [[nodiscard]] std::size_t keepers(std::size_t domain) const {
    return scatters() ? who_.domains[domain].size() : slices_;
  }
  [[nodiscard]] Part part_of(std::size_t domain, std::size_t place) const;
  /// Returns the rank of domain `domain` that serves this keeper.
  [[nodiscard]] int server(std::size_t domain, std::size_t keeper_domain,
                           std::size_t keeper_place) const;
  void add_domain(std::size_t domain);
  bool serve(Keeper& keeper);
  bool combine_next();
  bool place(Result& result);
  [[nodiscard]] bool has_done_all() const;

  const std::shared_ptr<const Elements> all_;
  const MemberParts parts_;   ///< of a reducescatter, by rank
  const bool small_;          ///< an allreduce in which every domain keeps everything
  const std::size_t slices_;  ///< of an allreduce
  const std::size_t chunk_elements_;
  Part own_;                               ///< nothing where this rank is no keeper
  std::size_t combined_ = 0;               ///< elements of it
  std::span<std::byte> own_contribution_;  ///< unless raw
  std::deque<Keeper> keepers_;             // stay where they are, as the next two
  std::deque<Source> sources_;
  std::deque<Result> results_;
  std::optional<ChunkedSend> own_results_;
  std::vector<const std::byte*> from_;  ///< per domain
  bool counted_ = false;
};

}  // namespace hvd
