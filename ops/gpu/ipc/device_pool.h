#pragma once
/// A DevicePool is this rank's memory on a GPU that other ranks can open: slabs from cudaMalloc,
/// handed out in blocks, with their CUDA IPC handles written where the ranks of the host see them.
/// OwnEvents are its events that they can open, and Peers is the view of their memory and events.
/// Any thread may use a DevicePool (the submitting ones allocate), and only the thread that has the
/// turn the others. They own what they made or opened. They fail with BackendError; a want of
/// memory is said by the result of `allocate`.
// Tested in tests/ops/gpu/ipc/shared_gpu_limits_test.cc

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/api/handles.h"
#include "ops/shm/memory/arena.h"

namespace hvd::gpu {

/// A SharedControl is what a rank tells the ranks of its host, in its shared memory. It is written
/// by its owner before it announces a tensor or arrives at a batch, which is what orders the
/// others' reads.
struct SharedControl {
  static constexpr std::size_t kSlabs = 64;
  static constexpr std::size_t kEvents = 4;
  static constexpr std::size_t kBatches = 256;  ///< that may be under way: the board's ring

  std::array<IpcHandle, kSlabs> slabs;
  std::array<IpcHandle, kEvents>
      packed;  ///< events: this rank's inputs are where they are read from
  std::array<IpcHandle, kEvents> reduced;  ///< events: what this rank reduced for all is written
  /// Says, by the batch's sequence number modulo the ring, which of `packed` this rank has recorded
  /// for it.
  std::array<std::uint32_t, kBatches> packed_turn;
  std::atomic<bool> closed;  ///< this rank has nothing of the others' open any more

  /// A Probe says how far a rank is with finding out whether memory and events can be shared at all
  /// (sharing_probe.h).
  enum class Probe : std::uint32_t { None, Exported, Opened, Refused };
  std::atomic<Probe> probe;
  IpcHandle probe_memory, probe_event;
};

/// A PoolPlace is a place in some rank's pool. It fits beside the marks that engines put on a
/// location.
struct PoolPlace {
  static constexpr unsigned kOffsetBits = 40;
  std::uint64_t slab = 0;
  std::uint64_t offset = 0;
  [[nodiscard]] std::uint64_t word() const { return slab << kOffsetBits | offset; }
  static PoolPlace of(std::uint64_t word) {
    constexpr std::uint64_t kMask = (std::uint64_t{1} << kOffsetBits) - 1;
    return {(word >> kOffsetBits) % SharedControl::kSlabs, word & kMask};
  }
};

class DevicePool {
 public:
  /// `control` outlives the pool.
  DevicePool(const CallContext& site, SharedControl& control) : site_(site), control_(control) {}
  ~DevicePool();
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  /// At least `bytes`, aligned to 64; null when the GPU has no more.
  std::byte* allocate(std::size_t bytes);
  void free(void* block) noexcept;
  /// Returns the place of an address inside one of the slabs.
  [[nodiscard]] std::optional<PoolPlace> find(const void* address) const;
  [[nodiscard]] std::byte* at(const PoolPlace& place) const;
  [[nodiscard]] std::size_t slabs() const;

 private:
  struct Slab {
    std::byte* base = nullptr;
    std::size_t bytes = 0;
    std::unique_ptr<Arena> blocks;
  };
  /// False when the GPU has no more.
  bool grow(std::size_t bytes);

  const CallContext site_;
  SharedControl& control_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
};

/// OwnEvents are this rank's events, whose handles are written where the ranks of the host see
/// them. For the thread that has the turn.
class OwnEvents {
 public:
  struct Turn {
    Event packed, reduced;
  };
  /// `control` outlives the events.
  explicit OwnEvents(SharedControl& control) : control_(control) {}

  /// Makes them, unless they are made.
  void make(const CallContext& site);
  [[nodiscard]] bool made() const { return !turns_.empty(); }
  [[nodiscard]] Turn& at(std::size_t turn) { return turns_[turn]; }
  /// Returns which of them the next batch uses.
  std::size_t next() { return launches_++ % turns_.size(); }

 private:
  SharedControl& control_;
  std::vector<Turn> turns_;
  std::size_t launches_ = 0;
};

/// Peers are the other ranks' memory and events, opened at first use.
class Peers {
 public:
  /// `controls`: by index in the domain.
  Peers(std::vector<SharedControl*> controls, int self)
      : controls_(std::move(controls)), self_(self) {}
  ~Peers() { close(); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  std::byte* memory(const CallContext& site, int index, const PoolPlace& place);
  CudaEvent* packed(const CallContext& site, int index, std::size_t turn);
  CudaEvent* reduced(const CallContext& site, int index, std::size_t turn);
  /// Closes everything and says so in this rank's control. Idempotent. Waits for what the device
  /// still does with it.
  void close() noexcept;
  /// Returns whether all ranks have closed everything.
  [[nodiscard]] bool all_closed() const;

 private:
  void close_opened() noexcept;
  void know(const CallContext& site) {
    table_ = site.table;
    device_ = site.device;
  }
  CudaEvent* event(const CallContext& site, const IpcHandle& handle);
  const std::vector<SharedControl*> controls_;
  const int self_;
  const GpuApi* table_ = nullptr;
  int device_ = 0;
  std::map<std::pair<int, std::uint64_t>, void*> slabs_;  // by rank's index and number
  std::map<const IpcHandle*, CudaEvent*> events_;
};

}  // namespace hvd::gpu
