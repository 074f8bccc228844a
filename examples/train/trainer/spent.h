#pragma once
/// Spent is where a rank's time went. The clock is the host's: work that a GPU does while the host goes on shows where the host waits for
/// it. Plain values of one thread, without LibTorch.

#include <chrono>

namespace examples {

struct Spent {
  double compute = 0;        ///< seconds in forward, backward and the optimizer's own work
  double input = 0;          ///< waiting for batches
  double communication = 0;  ///< waiting for gradients of other ranks when backward is over: what could not be hidden
  double evaluation = 0;
  double checkpoints = 0;

  void operator+=(const Spent& other) {
    compute += other.compute;
    input += other.input;
    communication += other.communication;
    evaluation += other.evaluation;
    checkpoints += other.checkpoints;
  }
};

/// Adds the time that it lives to a field of Spent.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace examples
