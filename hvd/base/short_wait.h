#pragma once
/// ShortWait waits for another rank without sleeping, for about as long as sleeping and being woken would take. It learns: where that was
/// in vain, the next waits end at once, less and less often tried again, until one helps. Any thread; those that wait at once share what
/// was learned.
///
/// Ranks that have a core each look for about 10 us, and then go on for about twice the time that it takes to fall asleep and be woken: a
/// shorter time gives two ranks that wait for each other in turn a slow state that they do not leave, as the one that was woken is late by
/// that time, for which the other has fallen asleep. Looking so long is in vain where the other has lost its core, perhaps to this thread.
/// (2 ranks on 2 cores, 4 B: 0.55 us; with 10 us of looking alone 3 to 12 us for the first second of a program; always with 100 us, beside
/// another program on one core, up to 104 us; with sched_yield between looks, beside one on each core, 2 ms.)
/// Ranks that share cores offer theirs: the one awaited may be the next to run there. That is in vain where somebody else's work takes it.
/// (4 ranks on 2 cores: 4 B 8 us instead of 22 with sleeping at once, alltoall of 256 KiB 45 instead of 104.)

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "hvd/base/futex.h"

namespace hvd {

class ShortWait {
 public:
  explicit ShortWait(bool has_core) : has_core_(has_core) {}

  /// Returns whether `is_done` before it was time to sleep.
  template <class IsDone>
  bool until(const IsDone& is_done) {
    if (has_core_ ? look(is_done) : is_done()) return true;
    if (const unsigned left = left_out_.load(std::memory_order_relaxed); left > 0) {
      left_out_.store(left - 1, std::memory_order_relaxed);
      return false;
    }
    const Outcome outcome = has_core_ ? look_on(is_done) : offer_core(is_done);
    const unsigned in_vain = outcome == Outcome::InVain ? std::min(in_vain_.load(std::memory_order_relaxed) + 1, kMostInVain) : 0;
    in_vain_.store(in_vain, std::memory_order_relaxed);
    if (in_vain > 0) left_out_.store(1U << in_vain, std::memory_order_relaxed);
    return outcome == Outcome::Done;
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Outcome : std::uint8_t { Done, TimeToSleep, InVain };
  static constexpr int kLooks = 300;  // about 10 us
  static constexpr std::chrono::microseconds kLongest{100};
  static constexpr int kOffers = 20;
  static constexpr std::chrono::microseconds kLongestOffer{50};  // the other ranks' turns on this core are shorter
  static constexpr unsigned kMostInVain = 10;

  template <class IsDone>
  static bool look(const IsDone& is_done) {
    for (int i = 0; i < kLooks; ++i) {
      if (is_done()) return true;
      cpu_relax();
    }
    return false;
  }
  template <class IsDone>
  static Outcome look_on(const IsDone& is_done) {
    const auto end = Clock::now() + kLongest;
    do {
      if (look(is_done)) return Outcome::Done;
    } while (Clock::now() < end);
    return Outcome::InVain;
  }
  template <class IsDone>
  static Outcome offer_core(const IsDone& is_done) {
    const auto end = Clock::now() + kLongestOffer;
    for (int i = 0; i < kOffers; ++i) {
      std::this_thread::yield();
      if (is_done()) return Outcome::Done;
      if (Clock::now() >= end) return Outcome::InVain;
    }
    return Outcome::TimeToSleep;
  }

  const bool has_core_;
  std::atomic<unsigned> in_vain_{0};   // waits one after the other
  std::atomic<unsigned> left_out_{0};  // of the next ones
};

}  // namespace hvd
