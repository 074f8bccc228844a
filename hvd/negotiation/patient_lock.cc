#include "hvd/negotiation/patient_lock.h"

#include <cerrno>
#include <cstring>
#include <ctime>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);  // between two looks at whether the lock's owner lives

#ifdef __SANITIZE_THREAD__
/// ThreadSanitizer does not see that a lock whose owner has died is taken by pthread_mutex_timedlock.
void tell_sanitizer(pthread_mutex_t& mutex) {
  __tsan_mutex_pre_lock(&mutex, 0);
  __tsan_mutex_post_lock(&mutex, 0, 0);
}
#else
void tell_sanitizer(pthread_mutex_t& /*mutex*/) {}
#endif

timespec in_a_slice() {
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);  // ThreadSanitizer does not know pthread_mutex_clocklock
  until.tv_nsec += std::chrono::nanoseconds(kSlice).count();
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  return until;
}

}  // namespace

void make_robust_mutex(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

void PatientLock::lock() {
  const int result = pthread_mutex_trylock(&mutex_);
  if (result == EBUSY) return wait();
  own(result);
}

void PatientLock::unlock() {
  owner_.store(kNobody, std::memory_order_relaxed);
  pthread_mutex_unlock(&mutex_);
}

void PatientLock::own(int result) {
  if (result == EOWNERDEAD) {
    // A dead owner leaves at most a record that was never published (the tail is stored last), or counters of a world that its
    // death ends anyway: the state can be used as it is.
    pthread_mutex_consistent(&mutex_);
    const int before = owner_.load(std::memory_order_relaxed);
    const auto dead = before != kNobody ? std::optional<int>(before) : board_.find_dead();
    board_.set_failure({Status::Code::RankFailed, formatted("{} died while it wrote to the memory that the ranks of its host share",
                                                            dead ? name_of_rank(*dead) : "a rank")});
  } else if (result != 0) {
    throw BackendError(formatted("the lock of the memory that the ranks of this host share: {}", std::strerror(result)));
  }
  owner_.store(self_, std::memory_order_relaxed);
}

void PatientLock::wait() {
  const auto since = std::chrono::steady_clock::now();
  auto next_warning = patience_.warn_after;
  while (true) {
    const timespec until = in_a_slice();
    const int result = pthread_mutex_timedlock(&mutex_, &until);
    if (result == EOWNERDEAD) tell_sanitizer(mutex_);
    if (result != ETIMEDOUT) return own(result);
    const auto waited = std::chrono::steady_clock::now() - since;
    if (patience_.fail_after.count() > 0 && waited >= patience_.fail_after)
      board_.set_failure({Status::Code::StallTimeout, stalled_text(waited)});
    board_.throw_failure();
    if (next_warning.count() == 0 || waited < next_warning) continue;
    next_warning += patience_.warn_after;
    log(LogLevel::Warning, "{}", stalled_text(waited));
  }
}

std::string PatientLock::name_of_rank(int index) const {
  const auto place = static_cast<std::size_t>(index);
  return formatted("rank {}", place < patience_.ranks.size() ? patience_.ranks[place] : index);
}

std::string PatientLock::stalled_text(std::chrono::nanoseconds waited) const {
  const int owner = owner_.load(std::memory_order_relaxed);
  return formatted(
      "{} has kept the others of its host from going on for {} s, in the middle of a write to their shared memory: it is stopped (SIGSTOP, "
      "a "
      "debugger, a frozen container) or gets no processor time",
      owner == kNobody ? "a rank" : name_of_rank(owner), std::chrono::duration_cast<std::chrono::seconds>(waited).count());
}

}  // namespace hvd
