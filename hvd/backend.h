#pragma once
/// The port through which a batch is executed. Called by the rank's driver only (the coordination thread, or a
/// user thread inside `wait()` that has taken its place): one thread at a time, never two. `prepare` and `release` are the
/// exception: the submitting thread calls them, possibly several at once.
/// A backend owns its communicators, streams and staging memory; the buffers of a member belong to the submission.
/// It fails by throwing an Error; the engine catches it once and fails every handle of the world with its reason.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/types.h"

namespace hvd {

/// The ranks that take part in a collective, ascending. `ranks[i]` is the global rank of the set's rank i.
struct ProcessSetInfo {
  int id = 0;
  std::vector<int> ranks;
  int rank = -1;  ///< this process's rank in the set, -1 outside
};

/// What decides which backend runs a batch: equal on every rank of the batch.
struct BatchTraits {
  OpKind kind = OpKind::Allreduce;
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  Device device;  ///< the kind is equal on all ranks; the index is this rank's own
  double prescale_factor = 1;
  double postscale_factor = 1;
  int root = 0;  ///< global rank, Broadcast only
  const ProcessSetInfo* set = nullptr;
};

/// One tensor of this rank inside a batch.
struct BatchMember {
  std::string_view name;
  const void* input = nullptr;  ///< `count` elements
  /// Allgather, Alltoall: sum of `counts` elements. Reducescatter: this rank's of `counts`. Otherwise `count`; may equal `input`.
  void* output = nullptr;
  std::int64_t count = 0;
  /// In the order of the batch's ranks. Allgather, Alltoall: elements that come from each. Reducescatter: elements that each keeps.
  std::vector<std::int64_t> counts;
  /// Alltoall: where in the input of each rank the elements for this one begin.
  std::vector<std::int64_t> offsets;
  /// Alltoall: elements of this rank's input that go to each, one after the other.
  std::vector<std::int64_t> sends;
  /// Native event (cudaEvent_t) after which `input` may be read; null when it already may.
  void* ready_event = nullptr;
  /// What lies between the end of `output` and the next multiple of `kMemberAlignment` may be overwritten.
  bool padded = false;
  /// Set by `prepare` where it copies the input.
  bool copied = false;
  /// What `prepare` returned on each rank of this rank's shared-memory domain, by the rank's index in the domain.
  std::vector<std::uint64_t> locations;
};

inline std::size_t bytes_of(const BatchTraits& traits, std::int64_t count) {
  return static_cast<std::size_t>(count) * element_bytes(traits.dtype);
}

struct Batch {
  std::uint64_t sequence = 0;  ///< the same on all ranks of the domain; of no other batch before or after
  std::uint64_t order = 0;     ///< the same on all ranks of the process set, ascending
  BatchTraits traits;
  /// Global ranks that take part, ascending: those of the set, less those that have joined (whose values count as zeros).
  std::vector<int> ranks;
  std::vector<BatchMember> members;
  bool timed = false;  ///< a timeline wants to know when results are copied out
};

enum class Progress : std::uint8_t { Idle, Advanced, Done };

/// A batch under way. `advance` does what can be done now without blocking.
/// Idle: nothing could be done, another rank or the device is awaited. Advanced: call again. Done: outputs are complete for
/// the host, or, where `completion_event` is not null, will be once that event has happened.
class Execution {
 public:
  virtual ~Execution() = default;
  virtual Progress advance() = 0;
  /// Native event (cudaEvent_t) that follows the last write to the outputs; owned by the execution. Null on hosts.
  virtual void* completion_event() { return nullptr; }
  /// Whether all is enqueued on the device: nothing is left to be done here, and the outputs follow `completion_event`.
  [[nodiscard]] virtual bool is_enqueued() const { return false; }
  /// Of a batch that is done and was to be timed: since when results were copied to where the user keeps them, if they were.
  [[nodiscard]] virtual std::optional<std::chrono::steady_clock::time_point> copying_out_since() const { return std::nullopt; }
};

/// Batches up to this size are done at once by whoever completes the agreement.
inline constexpr std::int64_t kSmallBatchBytes = 64 << 10;

class Backend {
 public:
  virtual ~Backend() = default;

  /// "shm", "mpi", "nccl": what timelines and the line printed at `init()` call it.
  virtual std::string_view name() const = 0;
  /// Pure: depends on the arguments alone, so that every rank chooses the same backend.
  virtual bool supports(const BatchTraits& traits) const = 0;

  /// Called on the submitting thread before the tensor is announced: makes the input visible to the other ranks of the domain
  /// where the backend works on it in place, and returns where it is. Every rank of the domain sees the word in
  /// `BatchMember::locations`. The default publishes nothing.
  virtual std::uint64_t prepare(const BatchTraits& /*traits*/, BatchMember& /*member*/) { return 0; }
  /// Undoes `prepare` for a member that will not be launched, because the ranks disagreed or the world failed.
  virtual void release(const BatchTraits& /*traits*/, std::uint64_t /*location*/) noexcept {}

  virtual std::unique_ptr<Execution> launch(Batch batch) = 0;

  /// Device memory, aligned to `kMemberAlignment`, for tensors that such allreduces then work on in place, without packing: as far as the
  /// tensors of a batch lie in it one after the other, each at the next multiple of `kMemberAlignment`, with nothing between them or
  /// nothing that matters (`padded`). It stays as long as the pointer, also after the backend. Any thread. Null where there is no such
  /// memory, or no more.
  virtual std::shared_ptr<void> allocate(const BatchTraits& /*traits*/, std::size_t /*bytes*/) { return nullptr; }

  // ---- small operations that one rank does for all of the domain (hvd/engine/fast_path.h); any thread, one at a time
  /// A block of this rank's own that all ranks of the domain see and that `prepare` would have returned; it stays until `drop`. None where
  /// the backend cannot do such an operation so.
  virtual std::optional<std::uint64_t> keep(const BatchTraits& /*traits*/, std::size_t /*bytes*/) { return std::nullopt; }
  virtual void drop(std::uint64_t /*location*/) noexcept {}
  /// Whether the block may be filled: not while others read from it what it held for a batch.
  virtual bool is_free(std::uint64_t /*location*/) { return true; }
  /// Where this rank's own block is.
  virtual std::byte* kept(std::uint64_t /*location*/) { return nullptr; }
  /// `locations`: of each rank of the set, in its order, a location. False, and nothing has happened, unless all are kept blocks.
  /// Otherwise the blocks, which hold inputs of `count` elements, then hold results: Allgather all inputs one after the other, all others
  /// (Reducescatter too) `count` elements.
  virtual bool run_for_all(const BatchTraits& /*traits*/, std::int64_t /*count*/, std::span<const std::uint64_t> /*locations*/) {
    return false;
  }

  /// True when idle executions learn of progress through the board's bell; false when they must be polled.
  virtual bool notifies() const { return false; }
  /// True when no rank of the domain needs the others' help to finish such a batch of so many bytes, once it is agreed; false when
  /// each rank has to take part soon.
  virtual bool any_rank_finishes(const BatchTraits& /*traits*/, std::int64_t /*bytes*/) const { return false; }
  /// Ends what is under way with an error as soon as possible. Called once, when the world has failed.
  virtual void abort() noexcept {}
};

}  // namespace hvd
