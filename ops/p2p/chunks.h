#pragma once
/// ChunkedSend and ChunkedReceive are the two ends of a run of elements on its way from one rank to another, in chunks, a few of them under
/// way at once. Both sides must agree about the number of elements, their size and the size of a chunk; then the chunks pair up in order,
/// all with one tag. A run without elements is no message. Sends are synchronous (see exchange.h). Buffers are made when they are first
/// needed.
/// They must not be moved once a message is under way, and are for one thread at a time.

#include <array>

#include "ops/p2p/exchange.h"
#include "ops/partition.h"

namespace hvd {

/// A ChunkedRun says how a run travels.
struct ChunkedRun {
  int peer = 0;
  int tag = 0;
  std::size_t elements = 0;
  std::size_t element_bytes = 1;  ///< on the wire
  std::size_t chunk_elements = 1;

  [[nodiscard]] std::size_t chunks() const { return (elements + chunk_elements - 1) / chunk_elements; }
  [[nodiscard]] Range chunk(std::size_t number) const {
    return {number * chunk_elements, std::min((number + 1) * chunk_elements, elements)};
  }
  [[nodiscard]] std::size_t buffer_bytes() const { return std::min(chunk_elements, elements) * element_bytes; }
};

class ChunkedSend {
 public:
  static constexpr std::size_t kWindow = 4;
  ChunkedSend(Requests& requests, const ChunkedRun& run) : requests_(requests), run_(run) {}
  ChunkedSend(const ChunkedSend&) = delete;
  ChunkedSend& operator=(const ChunkedSend&) = delete;

  /// All has been given to the wire.
  [[nodiscard]] bool over() const { return sent_ == run_.chunks(); }
  /// Returns whether another chunk is left and can be sent now.
  [[nodiscard]] bool has_room() const { return !over() && slots_[sent_ % kWindow].under_way == 0; }
  /// Returns the next chunk's elements, and the memory to put them into before `send`. Precondition: `has_room`.
  [[nodiscard]] Range next() const { return run_.chunk(sent_); }
  std::byte* buffer() {
    Slot& slot = slots_[sent_ % kWindow];
    if (slot.memory.empty()) slot.memory = requests_.buffer(run_.buffer_bytes());
    return slot.memory.data();
  }
  void send() {
    Slot& slot = slots_[sent_ % kWindow];
    requests_.send_synchronously(slot.memory.first(next().size() * run_.element_bytes), run_.peer, run_.tag, slot.under_way);
    ++sent_;
  }

 private:
  struct Slot {
    std::span<std::byte> memory;
    std::size_t under_way = 0;
  };
  Requests& requests_;
  const ChunkedRun run_;
  std::array<Slot, kWindow> slots_;
  std::size_t sent_ = 0;
};

class ChunkedReceive {
 public:
  static constexpr std::size_t kWindow = 4;
  ChunkedReceive(Requests& requests, const ChunkedRun& run) : requests_(requests), run_(run) {}
  ChunkedReceive(const ChunkedReceive&) = delete;
  ChunkedReceive& operator=(const ChunkedReceive&) = delete;

  /// All has arrived and been taken.
  [[nodiscard]] bool over() const { return taken_ == run_.chunks(); }
  /// Awaits what there is room for; true if that was something new.
  bool await() {
    bool worked = false;
    for (; awaited_ < run_.chunks() && awaited_ - taken_ < kWindow; ++awaited_) {
      Slot& slot = slots_[awaited_ % kWindow];
      if (slot.memory.empty()) slot.memory = requests_.buffer(run_.buffer_bytes());
      requests_.receive(slot.memory.first(run_.chunk(awaited_).size() * run_.element_bytes), run_.peer, run_.tag, slot.under_way);
      worked = true;
    }
    return worked;
  }
  /// Returns whether the next chunk has arrived: the elements `next`, at `data`, until `take`.
  [[nodiscard]] bool has_next() const { return taken_ < awaited_ && slots_[taken_ % kWindow].under_way == 0; }
  [[nodiscard]] Range next() const { return run_.chunk(taken_); }
  [[nodiscard]] const std::byte* data() const { return slots_[taken_ % kWindow].memory.data(); }
  void take() { ++taken_; }

 private:
  struct Slot {
    std::span<std::byte> memory;
    std::size_t under_way = 0;
  };
  Requests& requests_;
  const ChunkedRun run_;
  std::array<Slot, kWindow> slots_;
  std::size_t awaited_ = 0, taken_ = 0;
};

/// Elements of a chunk where up to `runs` runs come to a rank at once, of elements of so many bytes: the same on both sides.
inline std::size_t chunk_elements(std::size_t runs, std::size_t element_bytes) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;
  constexpr std::size_t kLeastBytes = std::size_t{64} << 10;
  constexpr std::size_t kAllBytes = std::size_t{32} << 20;
  const std::size_t bytes = std::clamp(kAllBytes / (std::max<std::size_t>(runs, 1) * ChunkedReceive::kWindow), kLeastBytes, kMostBytes);
  return std::max<std::size_t>(bytes / element_bytes, 1);
}

}  // namespace hvd
