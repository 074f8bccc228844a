#pragma once
/// A Display shows what training says while it runs: a bar that is redrawn in place on a terminal, a plain line now and then elsewhere. It
/// is silent on all ranks but 0, writes to standard output and never fails.

#include <chrono>
#include <cstdint>
#include <string>

#include "examples/train/trainer/records.h"

namespace examples {

/// Where training stands, for people.
struct Moment {
  std::int64_t epoch = 1, epochs = 1;
  std::int64_t step = 0, steps = 1;  ///< within the epoch
  double images_per_second = 0;
};

class Display {
 public:
  explicit Display(int rank);

  /// Whether it is time to show something again. The loss costs a wait for the device: ask first.
  bool due() const;
  void show(const Moment& moment, double loss);
  void show(const Record& record, std::int64_t epochs);
  void line(const std::string& text);

 private:
  void clear_bar();

  bool shown_;
  bool terminal_;
  bool bar_drawn_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace examples
