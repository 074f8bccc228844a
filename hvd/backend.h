#pragma once
/// Backend is the port through which a batch is executed. Only the thread of the rank that has the
/// turn launches and advances batches, calls `look_again` and `abort` (the coordination thread, or
/// a user thread in a call): one at a time, never two. All else any thread may call, several
/// at once: submitting threads call `supports`, `prepare`, `release` and `allocate`. A backend owns
/// its communicators, streams and staging memory; the buffers of a member belong to the submission.
/// It fails by throwing an Error; the engine catches it once and fails every handle of the world
/// with its reason. A new backend stands in the list in ops/backends.cc; CONTRIBUTING.md, "A new
/// backend", has an example.
// Tested in tests/contract/suite.cc

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "hvd/types.h"

#pragma GCC visibility push(default)
namespace hvd {

class SlotMemory;
class LeaderMemory;
class ExposedMemory;

/// A ProcessSetInfo says which ranks are in a process set.
struct ProcessSetInfo {
  int id = 0;              ///< the same on all ranks, 0 for the global set
  std::vector<int> ranks;  ///< ascending; `ranks[i]` is the global rank of the set's rank i
  int rank = -1;           ///< this process's rank in the set, -1 outside
  int number = 0;  ///< the same on all ranks: the smallest that no other set has; that of a removed
                   ///< set is given again
};

/// BatchTraits decide which backend runs a batch. They are equal on every rank of the batch.
struct BatchTraits : OperationTerms {
  DataType dtype = DataType::Float32;  ///< of all members
  Device device;  ///< the kind is equal on all ranks; the index is this rank's own
  const ProcessSetInfo* set = nullptr;  ///< stays valid as long as the engine
};

/// A BatchMember is one tensor of this rank inside a batch.
struct BatchMember {
  std::string_view name;        ///< as messages show it
  const void* input = nullptr;  ///< `count` elements
  /// Allgather, Alltoall: sum of `counts` elements. Reducescatter: this rank's of `counts`.
  /// Otherwise `count`; may equal `input`.
  void* output = nullptr;
  std::int64_t count = 0;  ///< elements of the input
  /// Elements by rank, in the batch's order. Allgather, Alltoall: those that come from each.
  /// Reducescatter: those that each keeps.
  std::vector<std::int64_t> counts;
  /// Alltoall: the places in the ranks' inputs at which the elements for this one begin.
  std::vector<std::int64_t> offsets;
  /// Alltoall: elements of this rank's input that go to each, one after the other.
  std::vector<std::int64_t> sends;
  /// Native event (cudaEvent_t) after which `input` may be read; null when it already may.
  void* ready_event = nullptr;
  /// True if the bytes between the end of `output` and the next multiple of `kMemberAlignment` may
  /// be overwritten.
  bool padded = false;
  /// Set by `prepare` where it copies the input.
  bool copied = false;
  /// The values that `prepare` returned on the ranks of this rank's shared-memory domain, by the
  /// rank's index in the domain.
  std::vector<std::uint64_t> locations;
};

/// Returns the bytes of `count` elements.
inline std::size_t bytes_of(const BatchTraits& traits, std::int64_t count) {
  return static_cast<std::size_t>(count) * element_bytes(traits.dtype);
}

/// A Batch is what a backend executes at once: tensors that all their ranks are ready for.
struct Batch {
  std::uint64_t sequence = 0;  ///< the same on all ranks of the domain, and of no other batch
  std::uint64_t order = 0;     ///< the same on all ranks of the process set, ascending
  BatchTraits traits;          ///< what all members have in common
  /// Global ranks that take part, ascending: those of the set, less those that have joined (whose
  /// values count as zeros).
  std::vector<int> ranks;
  std::vector<BatchMember> members;  ///< in the same order on all ranks
  bool timed = false;                ///< a timeline wants to know when results are copied out
};

/// Progress says what a call of Execution::advance has brought.
enum class Progress : std::uint8_t { Idle, Advanced, Done };

enum class Route : std::uint8_t;  // hvd/routes.h
enum class Access : std::uint8_t;

/// An Execution is a batch under way.
class Execution {
 public:
  virtual ~Execution() = default;
  /// Does what can be done now without blocking. Idle: nothing could be done, another rank or the
  /// device is awaited. Advanced: to be called again. Done: outputs are complete for the host, or,
  /// where `completion_event` is not null, will be once that event has happened. Throws what the
  /// world then fails with.
  virtual Progress advance() = 0;
  /// Returns the native event (cudaEvent_t) that follows the last write to the outputs; owned by
  /// the execution. Null on hosts.
  virtual void* completion_event() { return nullptr; }
  /// Returns whether all is enqueued on the device: nothing is left to be done here, and the
  /// outputs follow `completion_event`.
  [[nodiscard]] virtual bool is_enqueued() const { return false; }
  /// Returns whether the board's doorbells tell of what it waits for now, so that nobody has to ask
  /// again and again. Where the backend's `notifies` is true, they always do.
  [[nodiscard]] virtual bool is_rung() const { return false; }
  /// Returns which way the batch takes (hvd/routes.h); none where the backend has ways of its own.
  [[nodiscard]] virtual std::optional<Route> route() const { return std::nullopt; }
  /// Returns how ranks get at each other's inputs, where each takes its part.
  [[nodiscard]] virtual Access access() const { return Access{}; }
  /// Returns, of a batch that is done and was to be timed, since when results were copied to where
  /// the user keeps them, if they were.
  [[nodiscard]] virtual std::optional<std::chrono::steady_clock::time_point> copying_out_since()
      const {
    return std::nullopt;
  }
};

/// A Backend executes batches on one kind of memory.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Returns "shm", "mpi", "nccl"...: what timelines call it.
  virtual std::string_view name() const = 0;
  /// Returns whether it can run such batches. Depends on the arguments alone, so that every rank
  /// chooses the same backend.
  virtual bool supports(const BatchTraits& traits) const = 0;

  /// Makes the input visible to the other ranks of the domain, where the backend works on it in
  /// place, and returns where it is. Called on the submitting thread before the tensor is
  /// announced. Every rank of the domain sees the word in `BatchMember::locations`. The default
  /// publishes nothing.
  virtual std::uint64_t prepare(const BatchTraits& /*traits*/, BatchMember& /*member*/) {
    return 0;
  }
  /// Undoes `prepare` for a member that will not be launched, because the ranks disagreed or the
  /// world failed.
  virtual void release(const BatchTraits& /*traits*/, std::uint64_t /*location*/) noexcept {}

  /// Begins the batch, without blocking. Batches of a process set are launched in the same order on
  /// all its ranks.
  virtual std::unique_ptr<Execution> launch(Batch batch) = 0;

  /// Returns device memory, aligned to `kMemberAlignment`, for tensors that such allreduces then
  /// work on in place, without packing: as far as the tensors of a batch lie in it one after the
  /// other, each at the next multiple of `kMemberAlignment`, with nothing between them or nothing
  /// that matters (`padded`). It stays as long as the pointer, also after the backend. Any thread.
  /// Null where there is no such memory, or no more.
  virtual std::shared_ptr<void> allocate(const BatchTraits& /*traits*/, std::size_t /*bytes*/) {
    return nullptr;
  }

  /// Returns the memory in which one rank of the domain does small operations for all
  /// (hvd/fast_path_memory.h), if this backend has any. It lives as long as the backend.
  virtual SlotMemory* slot_memory() { return nullptr; }
  /// Returns the memory in which the leaders of all domains do small operations of all ranks for
  /// their domains. Otherwise like `slot_memory`.
  virtual LeaderMemory* leader_memory() { return nullptr; }
  /// Returns the way to memory that ranks of the domain send each other (hvd/exposed_memory.h), if
  /// this backend has one. Otherwise like `slot_memory`.
  virtual ExposedMemory* exposed_memory() { return nullptr; }

  /// Returns whether idle executions learn of progress through the board's doorbell, and any rank
  /// of the domain finishes a batch that is agreed, or rings for the others where it needs them.
  /// Otherwise they must be polled, and each rank has to take part soon.
  virtual bool notifies() const { return false; }
  /// Returns whether the device does what is enqueued in the order of the launches, so that the
  /// next batch of a set may be enqueued behind one that it is still at work on.
  virtual bool keeps_order() const { return false; }
  /// Does what has to be done from time to time also where nothing is under way, for messages of
  /// batches that are over. Called by the thread that has the turn. Throws what
  /// `Execution::advance` throws.
  virtual void look_again() {}
  /// Returns whether there is such: then idle ranks look every 10 ms.
  virtual bool looks_again() const { return false; }
  /// Ends what is under way with an error as soon as possible. Called once, when the world has
  /// failed. Returns whether nothing reads or writes any more what was launched: otherwise it is
  /// kept for as long as the process.
  virtual bool abort() noexcept { return true; }
};

}  // namespace hvd
#pragma GCC visibility pop
