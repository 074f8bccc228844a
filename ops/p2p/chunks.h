#pragma once
/// ChunkedSend and ChunkedReceive are the ends of a run of elements on its way from one rank to
/// others, in chunks, a few of them under way at once. All sides must agree about the number of
/// elements, their size and the size of a chunk; then the chunks pair up in order, all with one
/// tag. A run without elements is no message. Which sends must be synchronous, says
/// point_to_point.h. Buffers are made when they are first needed. They must not be moved once a
/// message is under way, and are for one thread at a time.
// Tested in tests/ops/p2p/reduce_execution_test.cc, tests/ops/p2p/backend_test.cc

#include <array>
#include <utility>
#include <vector>

#include "ops/p2p/exchange.h"
#include "ops/partition.h"

namespace hvd {

/// A ChunkedRun says how a run travels.
struct ChunkedRun {
  int tag = 0;
  std::size_t elements = 0;
  std::size_t element_bytes = 1;  ///< on the wire
  std::size_t chunk_elements = 1;

  [[nodiscard]] std::size_t chunks() const {
    return (elements + chunk_elements - 1) / chunk_elements;
  }
  [[nodiscard]] Range chunk(std::size_t number) const {
    return {number * chunk_elements, std::min((number + 1) * chunk_elements, elements)};
  }
  [[nodiscard]] std::size_t buffer_bytes() const {
    return std::min(chunk_elements, elements) * element_bytes;
  }
};

/// A ChunkSlot is a place for a chunk that is under way.
struct ChunkSlot {
  std::span<std::byte> memory;
  std::size_t under_way = 0;  ///< messages
};
/// The number of chunks of a run under way at once.
inline constexpr std::size_t kChunkWindow = 8;

class ChunkedSend {
 public:
  ChunkedSend(Requests& requests, const ChunkedRun& run, std::vector<int> to,
              SendMode mode = SendMode::Synchronous)
      : requests_(requests), run_(run), to_(std::move(to)), mode_(mode) {}
  ChunkedSend(const ChunkedSend&) = delete;
  ChunkedSend& operator=(const ChunkedSend&) = delete;

  /// All has been given to the wire.
  [[nodiscard]] bool over() const { return sent_ == run_.chunks(); }
  /// Returns whether another chunk is left and can be sent now.
  [[nodiscard]] bool has_room() const {
    return !over() && slots_[sent_ % kChunkWindow].under_way == 0;
  }
  /// Returns the next chunk's elements, and the memory to put them into before `send`.
  /// Precondition: `has_room`.
  [[nodiscard]] Range next() const { return run_.chunk(sent_); }
  std::byte* buffer() {
    ChunkSlot& slot = slots_[sent_ % kChunkWindow];
    if (slot.memory.empty()) slot.memory = requests_.buffer(run_.buffer_bytes());
    return slot.memory.data();
  }
  void send() {
    ChunkSlot& slot = slots_[sent_ % kChunkWindow];
    for (const int rank : to_)
      requests_.send(slot.memory.first(next().size() * run_.element_bytes), rank, run_.tag, mode_,
                     slot.under_way);
    ++sent_;
  }

 private:
  Requests& requests_;
  const ChunkedRun run_;
  const std::vector<int> to_;
  const SendMode mode_;
  std::array<ChunkSlot, kChunkWindow> slots_;
  std::size_t sent_ = 0;
};

class ChunkedReceive {
 public:
  /// `children`: whom `take` hands each chunk on to. `into`: memory for all of it; null: buffers,
  /// chunk by chunk.
  ChunkedReceive(Requests& requests, const ChunkedRun& run, int from,
                 std::vector<int> children = {}, std::byte* into = nullptr)
      : requests_(requests), run_(run), from_(from), children_(std::move(children)), into_(into) {}
  ChunkedReceive(const ChunkedReceive&) = delete;
  ChunkedReceive& operator=(const ChunkedReceive&) = delete;

  /// All has arrived and been taken.
  [[nodiscard]] bool over() const { return taken_ == run_.chunks(); }
  /// Returns how many elements have.
  [[nodiscard]] std::size_t taken() const {
    return std::min(taken_ * run_.chunk_elements, run_.elements);
  }
  /// Awaits what there is room for; true if that was something new.
  bool await() {
    bool worked = false;
    for (; awaited_ < run_.chunks() && awaited_ - taken_ < kChunkWindow; ++awaited_) {
      ChunkSlot& slot = slots_[awaited_ % kChunkWindow];
      if (slot.under_way > 0) break;  // still being handed on
      const Range range = run_.chunk(awaited_);
      if (into_ != nullptr) {
        slot.memory = {into_ + range.begin * run_.element_bytes, range.size() * run_.element_bytes};
      } else if (slot.memory.empty()) {
        slot.memory = requests_.buffer(run_.buffer_bytes());
      }
      requests_.receive(slot.memory.first(range.size() * run_.element_bytes), from_, run_.tag,
                        slot.under_way);
      worked = true;
    }
    return worked;
  }
  /// Returns whether the next chunk has arrived: the elements `next`, at `data`, where they stay
  /// until the next `await`.
  [[nodiscard]] bool has_next() const {
    return taken_ < awaited_ && slots_[taken_ % kChunkWindow].under_way == 0;
  }
  [[nodiscard]] Range next() const { return run_.chunk(taken_); }
  [[nodiscard]] const std::byte* data() const {
    return slots_[taken_ % kChunkWindow].memory.data();
  }
  /// Hands it on.
  void take() {
    ChunkSlot& slot = slots_[taken_ % kChunkWindow];
    const auto chunk = slot.memory.first(next().size() * run_.element_bytes);
    for (const int child : children_)
      requests_.send(chunk, child, run_.tag, SendMode::Synchronous, slot.under_way);
    ++taken_;
  }

 private:
  Requests& requests_;
  const ChunkedRun run_;
  const int from_;
  const std::vector<int> children_;
  std::byte* const into_;
  std::array<ChunkSlot, kChunkWindow> slots_;
  std::size_t awaited_ = 0, taken_ = 0;
};

/// Elements of a chunk where up to `runs` runs come to a rank at once, of elements of so many
/// bytes: the same on both sides.
inline std::size_t chunk_elements(std::size_t runs, std::size_t element_bytes) {
  constexpr std::size_t kMostBytes = std::size_t{512} << 10;
  constexpr std::size_t kLeastBytes = std::size_t{32} << 10;
  constexpr std::size_t kAllBytes = std::size_t{32} << 20;
  const std::size_t bytes = std::clamp(kAllBytes / (std::max<std::size_t>(runs, 1) * kChunkWindow),
                                       kLeastBytes, kMostBytes);
  return std::max<std::size_t>(bytes / element_bytes, 1);
}

}  // namespace hvd
