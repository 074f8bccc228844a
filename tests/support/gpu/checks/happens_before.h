#pragma once
/// Finds uses of memory without an order, on virtual GPUs: by a vector clock for each stream and
/// each host thread. An operation says which ranges it reads and writes; two that touch the same
/// bytes, one of them writing, without an order between them are an error that names both, whatever
/// the data are and in whichever order they have run. Only memory that is watched counts. Any
/// thread.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/gpu/shared_state.h"

namespace hvd::gpu::test {

/// Counts the steps of each actor that have happened.
class Clock {
 public:
  void join(const Clock& other);
  /// Counts one step more of the actor; returns its number.
  std::uint64_t tick(std::size_t actor);
  [[nodiscard]] std::uint64_t of(std::size_t actor) const {
    return actor < steps_.size() ? steps_[actor] : 0;
  }

 private:
  StateVector<std::uint64_t> steps_;
};

struct MemoryRange {
  const void* begin = nullptr;
  std::size_t bytes = 0;
};

/// Says what an operation does to memory.
struct UseOfMemory {
  std::string name = {};
  std::vector<MemoryRange> reads = {}, writes = {};
  bool reads_results = false;  ///< and nothing that nobody has written, as a copy does, and no
                               ///< collective, to which gaps are all one
};

class HappensBefore {
 public:
  /// Lets all host threads count as one that knows what any of them has seen: where they speak to
  /// each other in ways that are not known here (atomics, futexes, other processes' memory), each
  /// of which would be a false alarm. A thread that counts on what another has seen, and was not
  /// told, is ThreadSanitizer's to find, which sees those ways. Otherwise each knows what it has
  /// seen, and what it was told by `tell` and `hear`. Set before use.
  bool one_host = true;
  /// Of that one: it may have two voices. What the calling thread says next is said in this one;
  /// the second knows what the first does. Returns the one before.
  std::size_t speak_as(std::size_t voice);
  /// Wants results to be made of what somebody has written. For programs all of whose host accesses
  /// are known (`host_uses`). Likewise.
  bool knows_all_writes = false;

  /// Returns the actor of a new stream.
  std::size_t add_stream();

  // ---- the calling host thread
  [[nodiscard]] Clock now();
  void learn(const Clock& clock);
  void host_uses(const UseOfMemory& use);
  /// Gives what the thread knows to whoever hears of `subject` later.
  void tell(const void* subject);
  void hear(const void* subject);

  // ---- memory
  /// Watches fresh memory, which nobody has written.
  void watch(const void* begin, std::size_t bytes, const std::string& name);
  /// Notes that the calling thread frees it, which is a write; later uses are errors.
  void free(const void* begin, const std::string& call);
  /// Ends the watch.
  void forget(const void* begin);
  /// Notes that the host hands memory on: what any of it knows to have happened there counts as
  /// before all that comes.
  void hand_on(const void* begin, std::size_t bytes);

  /// Notes an operation of a stream at its clock, of which it is the last step.
  void stream_uses(std::size_t stream, const Clock& clock, const UseOfMemory& use);

  [[nodiscard]] std::vector<std::string> errors();

 private:
  struct Touch {
    std::size_t actor = 0;
    std::uint64_t step = 0;
    const StateText* who = nullptr;
  };
  struct Cell {
    std::uintptr_t end = 0;
    std::optional<Touch> write;
    StateVector<Touch> reads;
  };
  struct Region {
    std::size_t bytes = 0;
    StateText name;
    StateText freed;  ///< by what; empty: it is not
  };
  struct Thread {
    std::size_t actor = 0;
    Clock clock;
  };
  Thread& thread();
  const Region* region_of(std::uintptr_t at, std::uintptr_t* begin) const;
  void split(std::uintptr_t at);
  void touch(const MemoryRange& range, bool writes, const UseOfMemory& use, const Touch& touch,
             const Clock& clock);
  void check(const Cell& cell, std::uintptr_t at, bool writes, const UseOfMemory& use,
             const Touch& touch, const Clock& clock);
  void use(std::size_t actor, const Clock& clock, const UseOfMemory& use);
  void report(const std::string& error);
  std::string place(std::uintptr_t begin, std::uintptr_t end) const;

  std::mutex mutex_;
  std::size_t actors_ = 0;
  StateMap<std::size_t, Thread> threads_;  ///< or by voice
  StateMap<const void*, Clock> told_;
  StateMap<std::uintptr_t, Region> regions_;
  StateMap<std::uintptr_t, Cell> cells_;
  StateSet<StateText> names_;  ///< of operations
  StateVector<StateText> errors_;
};

}  // namespace hvd::gpu::test
