#pragma once
/// Lets the threads of ranks run one at a time, in an order drawn from a seed: what they do is then
/// the same each time. A thread keeps the baton until it finds the device or another rank not
/// ready, or passes it by itself. Any thread.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "ops/gpu/api/gpu_api.h"
#include "tests/support/random.h"

namespace hvd::gpu::test {

class Baton {
 public:
  Baton(int ranks, std::uint64_t seed)
      : random_(seed), states_(static_cast<std::size_t>(ranks), State::Absent) {}

  /// Waits for all ranks, and then for the rank's turn.
  void begin(int rank);
  /// Lets others run. Returns when it is the rank's turn again; at once for a rank that has left.
  void pass(int rank);
  /// Lets the rank run without the baton from now on.
  void leave(int rank);

 private:
  enum class State : std::uint8_t { Absent, Running, Left };
  void choose();
  void await(std::unique_lock<std::mutex>& lock, int rank);

  std::mutex mutex_;
  std::condition_variable changed_;
  hvd::test::Random random_;
  std::vector<State> states_;
  int holder_ = -1;
};

/// Returns `table` that calls `pass` where it says that something is not ready.
GpuApi taking_turns(GpuApi table, const std::function<void()>& pass);

}  // namespace hvd::gpu::test
