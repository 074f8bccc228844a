#pragma once
/// This header says how a thread waits for another rank before it sleeps on a doorbell: it looks
/// again and again where each rank of the host has a core, and offers its core between two looks
/// where ranks share cores, for the one awaited may be the next to run there. This is the policy of
/// all such waits, with the numbers and what they were measured by: no other file spins or gives
/// way.
///
/// Ranks that have a core each look for about 10 us, and then go on for about twice the time that
/// it takes to fall asleep and be woken: a shorter time gives two ranks that wait for each other in
/// turn a slow state that they do not leave, as the one that was woken is late by that time, for
/// which the other has fallen asleep. Looking so long is in vain where the other has lost its core,
/// perhaps to this thread. (2 ranks on 2 cores, 4 B: 0.55 us; with 10 us of looking alone 3 to 12
/// us for the first second of a program; always with 100 us, beside another program on one core, up
/// to 104 us; with sched_yield between looks, beside one on each core, 2 ms.) Offering a core is in
/// vain where somebody else's work takes it. (4 ranks on 2 cores: 4 B 8 us instead of 22 with
/// sleeping at once, alltoall of 256 KiB 45 instead of 104.)

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace hvd {

/// Tells the processor that this thread looks at something again and again.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// A WaitPlan says how long a wait goes on before its thread does something else.
struct WaitPlan {
  // Where each rank has a core:
  int looks = 0;                      ///< so many; 0: as long as `time`
  std::chrono::microseconds time{0};  ///< so long; 0: as many as `looks`
  int looks_for_offer = 0;            ///< after so many the core is offered; 0: never
  // Where ranks share cores, which are offered before each look:
  int offers = 0;
  std::chrono::microseconds longest{0};  ///< for all of them together; 0: however long they take
};

namespace waits {

using std::chrono::microseconds;
/// For the others to complete a batch, after this rank's part: about as long as to fall asleep and
/// be woken takes (256 KiB, 2 ranks: 75 to 134 us with sleeping at once, 20 to 24 with this).
inline constexpr WaitPlan kBatch{
    .time = microseconds(100), .offers = 20, .longest = microseconds(100)};
/// For a piece in a ring: it takes a rank that has a core less.
inline constexpr WaitPlan kPieceToTake{
    .time = microseconds(20), .offers = 20, .longest = microseconds(4000)};
/// The same of ranks that were just waited for in vain. Without a core of its own this rank offers
/// the one that it has.
inline constexpr WaitPlan kPieceInVain{.offers = 2, .longest = microseconds(4000)};
/// This is for readers to empty a ring: as long as to fall asleep and be woken takes.
inline constexpr WaitPlan kPieceToGive{
    .time = microseconds(100), .offers = 20, .longest = microseconds(4000)};
/// For other hosts' messages, of leaders in a round that they end among themselves: who is looked
/// for may need this core.
inline constexpr WaitPlan kDirectRound{.looks = 1000, .looks_for_offer = 20, .offers = 200};
/// For what rings no doorbell and must be polled: 4 B over MPI, 2 ranks, 35 us instead of 296; 4
/// ranks on 2 cores 63 to 79 instead of 170 to 350. The core is always offered, as the other end of
/// a wire may be on it.
inline constexpr WaitPlan kPolled{.looks = 400, .looks_for_offer = 1, .offers = 100};
/// For the turn, which the coordination thread keeps for some microseconds most often; it is a
/// thread of this rank, on whatever core.
inline constexpr WaitPlan kTurn{.looks = 20, .looks_for_offer = 1, .offers = 20};
/// For a rank that has claimed a round and is about to end it: nanoseconds, unless it has lost its
/// core. First as with a core, then without.
inline constexpr WaitPlan kClaim{.looks = 200, .offers = 100};

/// For another rank's part of a small operation, first: about 10 us, and not at all where ranks
/// share cores.
inline constexpr WaitPlan kFirst{.looks = 300};
/// And then, unless that was in vain lately. The other ranks' turns on a shared core are shorter.
inline constexpr WaitPlan kOn{.time = microseconds(100), .offers = 20, .longest = microseconds(50)};

}  // namespace waits

/// Waits look by look, where the caller has something to do in between. One thread.
class Pauses {
 public:
  explicit Pauses(bool has_core) : has_core_(has_core) {}
  /// Called after a look in vain: returns true after a moment, or false, at once, if the plan's
  /// looks or time are over.
  bool pause(const WaitPlan& plan) {
    const int turn = turns_++;
    if (turn >= (has_core_ ? plan.looks : plan.offers) &&
        !(has_core_ && plan.looks == 0 && plan.time.count() > 0))
      return false;
    if (const auto most = has_core_ ? plan.time : plan.longest; most.count() > 0) {
      const auto now = Clock::now();
      if (turn == 0) since_ = now;
      if (now - since_ >= most) return false;
    }
    if (!has_core_ || (plan.looks_for_offer > 0 && (turn + 1) % plan.looks_for_offer == 0)) {
      std::this_thread::yield();
    } else {
      cpu_relax();
    }
    return true;
  }
  /// Something has happened: the next wait begins.
  void again() { turns_ = 0; }

 private:
  using Clock = std::chrono::steady_clock;
  const bool has_core_;
  int turns_ = 0;
  Clock::time_point since_{};
};

/// Returns whether `is_done` before the plan was over.
template <class IsDone>
bool wait_until(const IsDone& is_done, const WaitPlan& plan, bool has_core) {
  for (Pauses pauses(has_core); !is_done();)
    if (!pauses.pause(plan)) return is_done();
  return true;
}

/// A ShortWait learns: where a wait was in vain, the next ones end at once, less and less often
/// tried again, until one helps. Any thread; those that wait at once share what was learned.
class ShortWait {
 public:
  explicit ShortWait(bool has_core) : has_core_(has_core) {}

  /// Returns whether `is_done` before it was time to sleep.
  template <class IsDone>
  bool until(const IsDone& is_done) {
    if (wait_until(is_done, waits::kFirst, has_core_)) return true;
    if (const unsigned left = left_out_.load(std::memory_order_relaxed); left > 0) {
      left_out_.store(left - 1, std::memory_order_relaxed);
      return false;
    }
    const auto since = std::chrono::steady_clock::now();
    const bool done = wait_until(is_done, waits::kOn, has_core_);
    const bool was_in_vain =
        !done && (has_core_ || std::chrono::steady_clock::now() - since >= waits::kOn.longest);
    const unsigned in_vain =
        was_in_vain ? std::min(in_vain_.load(std::memory_order_relaxed) + 1, kMostInVain) : 0;
    in_vain_.store(in_vain, std::memory_order_relaxed);
    if (in_vain > 0) left_out_.store(1U << in_vain, std::memory_order_relaxed);
    return done;
  }

 private:
  static constexpr unsigned kMostInVain = 10;

  const bool has_core_;
  std::atomic<unsigned> in_vain_{0};   // waits one after the other
  std::atomic<unsigned> left_out_{0};  // of the next ones
};

}  // namespace hvd
