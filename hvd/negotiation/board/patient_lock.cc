#include "hvd/negotiation/board/patient_lock.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <optional>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "hvd/base/text.h"

namespace hvd {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);  // between two looks after the lock's owner

#ifdef __SANITIZE_THREAD__
/// ThreadSanitizer does not see that a lock whose owner has died is taken by
/// pthread_mutex_timedlock.
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
    // A dead owner leaves at most a record that was never published (the tail is stored last), or
    // counters of a world that its death ends anyway: the state can be used as it is.
    pthread_mutex_consistent(&mutex_);
    const int before = owner_.load(std::memory_order_relaxed);
    const auto dead = before != kNobody ? std::optional<int>(before) : board_.find_dead();
    board_.set_failure(
        {Status::Code::RankFailed,
         formatted("{} died while it wrote to the memory that the ranks of its host share",
                   patience_.name_of_rank(dead.value_or(kNobody)))});
  } else if (result != 0) {
    throw BackendError(formatted("the lock of the memory that the ranks of this host share: {}",
                                 std::strerror(result)));
  }
  awaited_.store(kNobody, std::memory_order_relaxed);
  owner_.store(self_, std::memory_order_relaxed);
}

int PatientLock::culprit() const {
  const int awaited = awaited_.load(std::memory_order_relaxed);
  return awaited != kNobody ? awaited : owner_.load(std::memory_order_relaxed);
}

void PatientLock::wait() {
  PatientWait waiting(patience_, board_, PatientWait::kWrites);
  waiting.look_after(culprit());  // its time begins
  do {
    const timespec until = in_a_slice();
    const int result = pthread_mutex_timedlock(&mutex_, &until);
    if (result == EOWNERDEAD) tell_sanitizer(mutex_);
    if (result != ETIMEDOUT) return own(result);
  } while (waiting.look_after(culprit()));
  board_.failure().raise();
}

}  // namespace hvd
