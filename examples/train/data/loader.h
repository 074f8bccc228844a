#pragma once
/// A BatchLoader makes batches ahead of time in threads of its own, so that the device never waits for images. What it gives is what the
/// plan and `make_training_batch` give, in the same order and bit for bit, whatever the number of workers: every batch is a function of
/// (seed, epoch, its indices). One thread calls it. It owns the workers and refers to the dataset, which must outlive it. An exception of a
/// worker is thrown by the `next()` that would have given its step.

#include <cstdint>
#include <deque>
#include <vector>

#include "examples/train/data/batches.h"
#include "examples/train/data/ordered_workers.h"

namespace examples {

class BatchLoader {
 public:
  struct Options {
    std::size_t workers = 1;  ///< threads; 0: batches are made by `next()` itself
    std::size_t ahead = 2;    ///< steps that may be ready or in work before they are asked for; at least the number of workers is taken
    bool pinned = false;      ///< in page-locked memory, from which a copy to a GPU does not block; nothing where there is no GPU
  };
  BatchLoader(const Dataset& data, BatchPlan::Options plan, Options options);
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// As the plan's. What was made ahead of another epoch is dropped.
  void start_epoch(std::size_t epoch, std::size_t position = 0);
  /// The micro-batches of the next step; none when the epoch is over.
  std::vector<Batch> next();

  /// Images of this epoch in the steps that `next()` has given.
  [[nodiscard]] std::size_t position() const { return position_; }
  [[nodiscard]] bool over() const { return positions_.empty() && plan_.over(); }
  [[nodiscard]] const BatchPlan& plan() const { return plan_; }

 private:
  void order_ahead();

  const Dataset& data_;
  BatchPlan plan_;
  const std::uint64_t seed_;
  Options options_;
  std::size_t epoch_ = 0;
  std::size_t position_ = 0;
  std::deque<std::size_t> positions_;  ///< after each step that is ordered
  OrderedWorkers<std::vector<Batch>> workers_;
};

}  // namespace examples
