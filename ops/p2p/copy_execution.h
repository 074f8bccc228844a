#pragma once
/// A CopyExecution is one broadcast, allgather or alltoall across domains. Nothing is computed, so
/// what counts is that every byte reaches a domain once. Ranks of a domain read each other's
/// inputs, or large ones where they are. Between domains a stream of chunks goes
///
///   broadcast   from the root to the leaders of the other domains, their first ranks, down a
///               binomial tree of the domains, or along a chain: each hands chunks on as they come
///   allgather   from each rank to the leaders of all other domains
///   alltoall    from each rank to each rank of another domain
///
/// A leader that is not alone collects what comes in a block of its arena, for the other ranks of
/// its domain too: the block begins with how many elements of each stream are there, the batch's
/// state says where it is (`next_chunk`: location + 1), and the ranks copy what has come so far.
/// `finished` counts those that read nothing of the domain's blocks any more; until all are there,
/// blocks stay as they are.
// Tested in tests/ops/p2p/backend_test.cc, tests/ops/p2p/execution_test.cc

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>

#include "ops/p2p/chunks.h"
#include "ops/p2p/execution.h"

namespace hvd {

class CopyExecution final : public P2pExecution {
 public:
  CopyExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::Streams; }

 private:
  /// A stream that begins at this rank.
  struct Outgoing {
    Outgoing(Requests& requests, const ChunkedRun& run, std::vector<int> to, Elements of_inputs);
    ChunkedSend send;
    Elements elements;
  };
  /// A stream that begins in another domain, and whose elements this rank's outputs are to have.
  struct Incoming {
    Incoming(int of_source, Elements of_outputs, std::size_t in_collection)
        : source(of_source), elements(std::move(of_outputs)), offset(in_collection) {}
    int source;
    Elements elements;
    std::size_t offset;                     ///< of its bytes among those collected
    std::optional<ChunkedReceive> receive;  ///< on the rank that it comes to
    std::size_t placed = 0;                 ///< elements that the outputs have
    [[nodiscard]] bool is_placed() const { return placed == elements.flat.size(); }
  };
  /// The neighbours of a rank in a stream of chunks.
  struct Hop {
    int parent = -1;
    std::vector<int> children;
  };
  using Counter = std::atomic<std::uint64_t>;

  [[nodiscard]] bool is(OpKind kind) const { return batch_.traits.kind == kind; }
  [[nodiscard]] bool is_here(int rank) const {
    return std::binary_search(who_.here().begin(), who_.here().end(), rank);
  }
  [[nodiscard]] bool leads() const { return who_.self_place == 0; }
  [[nodiscard]] Hop hop_of(int source) const;
  void add_streams();
  void begin_collecting();
  [[nodiscard]] ChunkedRun run(const Elements& elements) const {
    return {context_.tag(batch_, 0), elements.flat.size(), element_, chunk_elements_};
  }
  void place(Incoming& incoming, Range range, const std::byte* from);
  bool copy_here();
  bool send(Outgoing& outgoing);
  bool take(Incoming& incoming);
  bool place_collected();

  [[nodiscard]] std::size_t counters_bytes() const {
    return (incoming_.size() * sizeof(Counter) + 63) / 64 * 64;
  }
  /// Elements of stream number `i` that the leader has collected.
  [[nodiscard]] Counter& counter(std::size_t i) const {
    return reinterpret_cast<Counter*>(collection_)[i];
  }
  [[nodiscard]] std::byte* collected(const Incoming& incoming) const {
    return collection_ + counters_bytes() + incoming.offset;
  }

  const Elements all_;     ///< of this rank's inputs
  const bool is_for_one_;  ///< what comes is for this rank alone: nothing is collected
  const std::size_t chunk_elements_;
  std::deque<Outgoing> outgoing_;  // stay where they are, as the next
  std::deque<Incoming>
      incoming_;  ///< in the same order on all ranks of the domain, where they are collected
  std::optional<std::uint64_t> collected_;  ///< leader: location of the collection
  std::byte* collection_ = nullptr;         ///< the leader's block, once it is there
  bool copied_here_ = false, counted_ = false;
  bool is_lost_ = false;  ///< a rank of this domain has died: this is never over
};

}  // namespace hvd
