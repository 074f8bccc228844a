#pragma once
/// Tells whether this process is a rank or was forked from one, and whether this thread is inside
/// of the library. Any thread. What a rank shares with others (its memory, its engine, MPI) belongs
/// to the process that called `init()`: a child that was forked from it has copies of the objects,
/// but neither their threads nor their connections, and must leave the world alone however it ends.
/// Programs that are started by posix_spawn, system or popen do not come here: they never run this
/// code.
// Tested in tests/ops/shm/shared_memory_test.cc, tests/system/scripts/process_forks.sh

#include <atomic>
#include <string>

#include "hvd/base/visible.h"

namespace hvd {

/// Returns the name of this host; "?" if the system does not tell it.
[[nodiscard]] HVD_BETWEEN_LIBRARIES std::string host_name();

/// From now on a child that is forked from this process knows that it was forked from `rank`.
void become_rank(int rank) noexcept;
/// The same, where it is no rank yet, and for good: such a world may outlive the global one.
void become_rank_of_some_world(int rank) noexcept;
/// From now on a child that is forked from this process is as good as this process, unless it has
/// been in a world beside the global one.
void cease_to_be_rank() noexcept;

namespace detail {
inline constexpr int kNotForked = -1;
HVD_BETWEEN_LIBRARIES extern std::atomic<int> forked_from;  // a rank
// a number of its own for each process in a line of forks
HVD_BETWEEN_LIBRARIES extern std::atomic<unsigned> process;
inline thread_local constinit int library_calls = 0;
}  // namespace detail

/// Returns whether this process was forked from a rank.
[[nodiscard]] inline bool is_forked_from_rank() {
  return detail::forked_from.load(std::memory_order_relaxed) != detail::kNotForked;
}
/// Returns the sentence that says so, for a message. Requires `is_forked_from_rank()`.
[[nodiscard]] HVD_BETWEEN_LIBRARIES const char* describe_fork() noexcept;

/// Remembers the process that made an object, for the object's end: in another process nothing may
/// be given back.
class MadeHere {
 public:
  [[nodiscard]] bool still_here() const {
    return detail::process.load(std::memory_order_relaxed) == process_;
  }

 private:
  unsigned process_ = detail::process.load(std::memory_order_relaxed);
};

/// Marks this thread as inside of the library for as long as it lives. An exit() that a signal
/// handler calls meanwhile would wait for locks that the interrupted code holds: see
/// `is_inside_library`.
class InsideLibrary {
 public:
  InsideLibrary() {
    ++detail::library_calls;
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  ~InsideLibrary() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    --detail::library_calls;
  }
  InsideLibrary(const InsideLibrary&) = delete;
  InsideLibrary& operator=(const InsideLibrary&) = delete;
};
/// Returns whether this thread, or the code that a signal handler of it has interrupted, is inside
/// of the library.
[[nodiscard]] inline bool is_inside_library() { return detail::library_calls > 0; }

}  // namespace hvd
