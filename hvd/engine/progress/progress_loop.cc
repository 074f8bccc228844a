#include "hvd/engine/progress/progress_loop.h"

#include <optional>

#include "hvd/base/process.h"
#include "hvd/base/threads.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

/// The wait before the coordination thread ends what a burst has gathered: its caller is about to,
/// and goes on if more has come meanwhile, for a few times.
constexpr auto kGatherTime = 50us;
constexpr int kMostGatherTimes = 4;
/// The wait before it tries once more where another thread has the turn.
constexpr auto kGatherAgain = 10ms;
/// A GPU waits so long, at most, for its next batch where it has ended all that it had.
constexpr auto kDevicePause = 100us;

}  // namespace

void ProgressLoop::start() {
  const SignalsKeptOff of_it;
  thread_ = std::thread([this] { coordinate(); });
}

void ProgressLoop::stop(bool in_order) {
  if (in_order) in_order_.store(true);
  stop_.store(true);
  board_.bells().ring_worker(board_.self());
}

void ProgressLoop::join() {
  if (thread_.joinable()) thread_.join();
}

void ProgressLoop::die() {
  die_.store(true);
  board_.bells().ring_worker(board_.self());
}

Turn ProgressLoop::take(std::chrono::steady_clock::time_point deadline) {
  while (true) {
    Turn turn = try_take();
    if (turn || Clock::now() > deadline) return turn;
    std::this_thread::sleep_for(50us);
  }
}

void ProgressLoop::wait_for(HandleState& pending) {
  burst_.end();
  pending.waited_for.store(true, std::memory_order_relaxed);
  // also where nothing is to be waited for: the next thing that others lack may be this thread's
  callers_.add_here();
  if (!may_go_on(pending)) {
    const CallerThreads::Wait waiting(callers_, pending);
    wait_until([&] { return may_go_on(pending); });
  }
  if (pending.done.load(std::memory_order_acquire)) pending.status.raise();
}

void ProgressLoop::drive_or_call(bool small_work) {
  if (small_work) {
    if (const Turn turn = try_take()) {
      engine_.progress(turn);
      return;
    }
  }
  board_.bells().ring_waiters();  // among them a thread of this rank that has the turn and sleeps
  board_.bells().ring_worker(board_.self());
}

void ProgressLoop::call_for_burst() {
  if (burst_.announce()) board_.bells().ring_worker(board_.self());
}

void ProgressLoop::hand_over(const Turn& turn) noexcept {
  const bool missed =
      has_missed_turn_.load(std::memory_order_relaxed) && has_missed_turn_.exchange(false);
  const bool more =
      engine_.has_more(turn) ||
      (missed && (burst_.is_gathering() || is_watching() || engine_.expects_messages(turn)));
  release();
  if (more) board_.bells().ring_worker(board_.self());
}

void ProgressLoop::release() noexcept {
  taken_.store(false, std::memory_order_release);
  const EngineLock lock(mutex_);
  mutex_.wake_own_threads();
}

void ProgressLoop::idle_wait(const Turn& turn, std::uint32_t seen_doorbell, unsigned idle_rounds) {
  if (idle_rounds == 0) polls_.again();
  if (engine_.polling(turn) != Polling::None) {
    if (polls_.pause(waits::kPolled)) return;
    const auto pause =
        std::min<std::chrono::microseconds>(20us * (1U << std::min(idle_rounds / 64, 5U)), 500us);
    if (idle_rounds > 4) std::this_thread::sleep_for(pause);
    return;
  }
  const Bells::Watcher watcher(board_.bells());
  if (engine_.has_results(turn)) return;
  const auto is_rung = [&] {
    return board_.bells().wait_doorbell().load(std::memory_order_acquire) != seen_doorbell;
  };
  if (short_wait_.until(is_rung)) return;
  board_.bells().sleep_waiting(seen_doorbell, until_trouble(idle_sleep()));
}

std::chrono::microseconds ProgressLoop::coordinate_once(Turn turn) {
  for (int round = 0; round < 64 && engine_.progress(turn); ++round) {
  }
  engine_.look_for_trouble(turn);
  std::chrono::microseconds pause = idle_sleep();
  if (engine_.has_more(turn)) {
    const Polling polling = engine_.polling(turn);
    pause = polling == Polling::Urgent ? kDevicePause : polling == Polling::Needed ? 1ms : 10ms;
  } else if (engine_.expects_messages(turn)) {
    pause = 1ms;
  }
  turn.loop_ = nullptr;  // not handed over: this thread comes back by itself
  release();
  return pause;
}

/// Gives a thread of the program that is submitting operations which are to travel together the
/// time to submit more of them.
void ProgressLoop::let_gather() {
  std::uint32_t before = 0;
  for (int times = 0; times < kMostGatherTimes && burst_.is_gathering(); ++times) {
    const std::uint32_t burst = burst_.count();
    if (times > 0 && burst <= before) return;
    before = burst;
    std::this_thread::sleep_for(kGatherTime);
  }
}

void ProgressLoop::coordinate() {
  const InsideLibrary inside;
  // while functions wait for results, which no other thread of this rank may
  std::optional<Bells::WorkerWatch> watch;
  pin_this_thread(parts_.config.thread_affinity, parts_.topology.local_rank);
  board_.begin_life();
  if (parts_.may_begin && !parts_.may_begin()) return;
  while (!stop_.load() && !die_.load()) {
    const std::uint32_t doorbell =
        board_.bells().work_doorbell(board_.self()).load(std::memory_order_seq_cst);
    std::chrono::microseconds pause = idle_sleep();
    if (!is_watching()) {
      watch.reset();
    } else if (!watch) {
      watch.emplace(board_.bells());
    }
    let_gather();
    if (Turn turn = try_take()) {
      pause = coordinate_once(std::move(turn));
    } else {
      has_missed_turn_.store(true);
      if (burst_.is_gathering()) {
        // among them a thread of this rank that has the turn and sleeps
        board_.bells().ring_waiters();
        // the turn may have been handed over just before it was missed
        pause = kGatherAgain;
      }
      if (watch) pause = kGatherAgain;
    }
    board_.bells().sleep_working(doorbell, until_trouble(pause));
  }
  // A coordination thread that ends otherwise, with its process, leaves its life unended: the
  // others read that as a death.
  if (in_order_.load() && !die_.load()) board_.end_life();
}

}  // namespace hvd
