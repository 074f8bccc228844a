#pragma once
/// What training costs a rank: where its time went, and how much memory it had at most. Spent and
/// Stopwatch are plain values of one thread; the functions never fail.

#include <torch/torch.h>

#include <chrono>
#include <cstdint>

namespace examples {

/// Where a rank's time went. The clock is the host's: work that a GPU does while the host goes on
/// shows where the host waits for it.
struct Spent {
  double compute = 0;  ///< seconds in forward, backward and the optimizer's own work
  double input = 0;    ///< waiting for batches
  double communication =
      0;  ///< waiting for gradients of other ranks when backward is over: what could not be hidden
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
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Begins a new measurement, where the system allows it; elsewhere peak_bytes() counts from the
/// process's start.
void reset_peak_bytes();
/// The most bytes of memory that the process had in use (its resident set) since then.
std::int64_t peak_bytes();

/// Begins a new measurement of how much of a GPU's memory LibTorch has in use; of the host it says
/// nothing.
void reset_device_peak(torch::Device device);
/// The most bytes of tensors since then; 0 for the host.
std::int64_t device_peak(torch::Device device);

}  // namespace examples
