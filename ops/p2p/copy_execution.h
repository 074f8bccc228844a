#pragma once
/// These executions are broadcast and allgather across domains. Nothing is computed, so what counts is that every byte reaches a domain
/// once.
///
/// Broadcast: one rank of each domain, its leader, gets the batch, flattened, in chunks down a binomial tree of the domains, and hands
///   each on at once. In the root's domain the leader is the root. The other ranks of a domain copy what the leader's blocks hold so
///   far; how many chunks that is, the batch's state says (`next_chunk`). `finished` counts those that have it all.
/// Allgather: each rank sends its blocks to the leaders of all other domains. A leader collects them in a block of its arena, which begins
///   with how many chunks of each source are there, and says in the batch's state where that is (`next_chunk`: location + 1); its domain's
///   ranks copy what has come so far. Ranks of the same domain read each other's blocks, or large inputs where they are. `finished` counts
///   the ranks that have it all; until all do, blocks stay as they are.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "ops/p2p/execution.h"

namespace hvd {

/// A chunk under way, in a ring of a few.
struct ChunkSlot {
  std::span<std::byte> buffer;
  std::size_t awaited = 0, sending = 0;
};

class BroadcastExecution final : public P2pExecution {
 public:
  BroadcastExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return is_chain_ ? Route::Chain : Route::Tree; }
  /// Returns the rank of a domain that gets the data from elsewhere, or sends it there.
  static int leader(std::span<const int> ranks, int root);

 private:
  static constexpr std::size_t kWindow = 8;
  [[nodiscard]] Range chunk(std::size_t number) const;
  [[nodiscard]] bool is_root() const { return parent_ < 0; }
  [[nodiscard]] bool leads() const { return leader_ == who_.self_place; }
  bool begin_next();
  bool hand_on_next();
  bool copy_next();

  const Flattened flat_;
  std::size_t leader_ = 0;  ///< its place among the domain's ranks
  std::size_t chunk_elements_ = 1, chunks_ = 0;
  bool is_chain_ = false;  ///< and not a tree
  int parent_ = -1;        ///< the rank that sends to this leader
  std::vector<int> children_;
  std::array<ChunkSlot, kWindow> slots_;
  std::size_t begun_ = 0;  ///< chunks awaited or read so far
  std::size_t held_ = 0;   ///< chunks that this rank has where they belong
};

class AllgatherExecution final : public P2pExecution {
 public:
  AllgatherExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::ToLeaders; }

 private:
  static constexpr std::size_t kWindow = 4;
  /// A Source is what a rank contributes: its blocks of all members.
  struct Source {
    std::size_t number;  ///< the rank's place in the set
    int rank;
    Flattened flat;
    std::size_t offset;  ///< of its bytes among those collected
    std::array<ChunkSlot, kWindow> slots{};
    std::size_t begun = 0, arrived = 0;  ///< chunks; leader
    std::size_t placed = 0;              ///< chunks that this rank's outputs have
  };
  using Counter = std::atomic<std::uint64_t>;

  [[nodiscard]] std::size_t chunks(const Flattened& flat) const { return (flat.size() + chunk_elements_ - 1) / chunk_elements_; }
  [[nodiscard]] Range chunk(const Flattened& flat, std::size_t number) const;
  [[nodiscard]] bool leads() const { return who_.self_place == 0; }
  [[nodiscard]] Source make_source(std::size_t number) const;
  void place(const Source& source, Range range, const std::byte* from);
  bool copy_here();
  bool send_next();
  bool receive_next(Source& source);
  bool place_collected(Source& source);
  bool collect();
  [[nodiscard]] std::size_t counters_bytes() const { return (elsewhere_.size() * sizeof(Counter) + 63) / 64 * 64; }
  /// Chunks of a source that the leader has collected.
  [[nodiscard]] Counter& counter(const Source& source) const {
    return reinterpret_cast<Counter*>(collection_)[&source - elsewhere_.data()];
  }
  [[nodiscard]] std::byte* collected(const Source& source, std::size_t element) const {
    return collection_ + counters_bytes() + source.offset + element * element_;
  }

  std::size_t chunk_elements_ = 1;
  std::vector<std::vector<std::size_t>> before_;  ///< per member: elements of the output before each rank's
  std::vector<Source> here_, elsewhere_;          ///< in the set's order
  std::vector<int> receivers_;
  std::array<ChunkSlot, kWindow> outgoing_;
  std::size_t sent_ = 0;
  std::optional<std::uint64_t> collected_;  ///< leader: location of the collection
  std::byte* collection_ = nullptr;         ///< the leader's block, once it is there
  bool copied_here_ = false, has_all_ = false;
  bool is_lost_ = false;  ///< a rank of this domain has died: this is never over
};

}  // namespace hvd
