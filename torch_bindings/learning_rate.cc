#include "torch_bindings/learning_rate.h"

#include <torch/torch.h>

#include <utility>

#include "hvd/base/text.h"

namespace hvd {

double scaled_learning_rate(double rate, std::int64_t batch_size_per_rank, std::int64_t reference_batch_size,
                            const ProcessSet& process_set) {
  if (batch_size_per_rank < 1 || reference_batch_size < 1)
    throw InvalidArgument(formatted("scaled_learning_rate: batch sizes {} and {}", batch_size_per_rank, reference_batch_size));
  return rate * static_cast<double>(batch_size_per_rank * process_set.size()) / static_cast<double>(reference_batch_size);
}

WarmupScheduler::WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options)
    : LRScheduler(optimizer), options_(std::move(options)), start_factor_(options_.start_factor ? *options_.start_factor : 1.0 / size()) {
  if (!(start_factor_ >= 0)) throw InvalidArgument(formatted("start_factor is {}; it must not be negative", start_factor_));
  for (auto& group : optimizer.param_groups()) {
    targets_.push_back(group.options().get_lr());
    group.options().set_lr(targets_.back() * factor(0));
  }
}

double WarmupScheduler::factor(unsigned step) const {
  if (step < options_.steps) return start_factor_ + (1 - start_factor_) * step / options_.steps;
  return options_.then ? options_.then(step - options_.steps) : 1;
}

std::vector<double> WarmupScheduler::get_lrs() {
  std::vector<double> rates;
  for (const double target : targets_)
    rates.push_back(target * factor(step_count_ + 1));  // step_count_ is the number of calls before this one
  return rates;
}

}  // namespace hvd
