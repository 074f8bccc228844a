#pragma once
/// These functions sleep on a 32-bit word that may be shared between processes (std::atomic::wait
/// is private to one). Any thread may call them. A wake-up that is missed costs at most the
/// timeout; nothing fails.
// Tested in tests/hvd/engine/fast_path_test.cc

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace hvd {

using FutexWord = std::atomic<std::uint32_t>;
static_assert(sizeof(FutexWord) == 4 && FutexWord::is_always_lock_free);

/// Sleeps while `word` is `value`, for at most `timeout`.
inline void futex_wait(FutexWord& word, std::uint32_t value, std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec limit{static_cast<time_t>(seconds.count()),
                       static_cast<long>((timeout - seconds).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

inline void futex_wake_all(FutexWord& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Orders all that this thread has read and written before all that it reads and writes from here
/// on. ThreadSanitizer does not know fences (GCC refuses them there), but what an atomic word
/// orders.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<unsigned> word{0};
  word.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// The processor may fetch the cache line at `place` meanwhile, to write there.
inline void prefetch_to_write(const void* place) {
#if defined(__x86_64__)
  // __builtin_prefetch fetches it to read, without -mprfchw
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(place)));
#else
  __builtin_prefetch(place, 1);
#endif
}

}  // namespace hvd
