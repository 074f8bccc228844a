#include "torch_bindings/training/learning_rate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/files/archives.h"

namespace hvd {

namespace {

/// Returns the targets of all groups: such that those that have come since have their own rates
/// now.
std::vector<double> with_later_groups(std::vector<double> targets, const Schedule& schedule,
                                      const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = targets.size(); g < groups.size(); ++g) {
    const double own = groups[g].options().get_lr(), of_0 = schedule.rate(0, schedule.steps()),
                 slope = schedule.rate(1, schedule.steps()) - of_0;
    targets.push_back(slope == 0 ? own : (own - of_0) / slope);
  }
  return targets;
}

}  // namespace

double scaled_learning_rate(double rate, std::int64_t batch_size_per_rank,
                            std::int64_t reference_batch_size, const ProcessSet& process_set) {
  if (batch_size_per_rank < 1 || reference_batch_size < 1)
    throw InvalidArgument(formatted("scaled_learning_rate: batch sizes {} and {}",
                                    batch_size_per_rank, reference_batch_size));
  return rate * static_cast<double>(batch_size_per_rank * process_set.size()) /
         static_cast<double>(reference_batch_size);
}

Schedule::Schedule(torch::optim::Optimizer& optimizer)
    : LRScheduler(optimizer), schedules_(optimizer) {
  for (const auto& group : optimizer.param_groups()) targets_.push_back(group.options().get_lr());
}

void Schedule::set_rates() {
  auto& groups = schedules_.param_groups();
  for (std::size_t g = 0; g < std::min(groups.size(), targets_.size()); ++g)
    groups[g].options().set_lr(rate(targets_[g], step_count_));
}

std::vector<double> Schedule::get_lrs() {
  targets_ = with_later_groups(std::move(targets_), *this, schedules_);
  std::vector<double> rates;
  for (const double target : targets_)
    // step_count_ is the number of calls before this one
    rates.push_back(rate(target, step_count_ + 1));
  return rates;
}

void Schedule::save(torch::serialize::OutputArchive& archive) const {
  archive.write("steps", c10::IValue(static_cast<std::int64_t>(step_count_)));
  archive.write("targets",
                torch::tensor(with_later_groups(targets_, *this, schedules_), at::kDouble));
}

void Schedule::load(torch::serialize::InputArchive& archive) {
  const auto steps = static_cast<unsigned>(detail::value_at(archive, "steps").toInt());
  at::Tensor targets;
  archive.read("targets", targets);
  const at::Tensor on_host = targets.to(at::kCPU, at::kDouble).contiguous();
  const std::size_t groups = schedules_.param_groups().size();
  if (on_host.numel() != static_cast<std::int64_t>(groups))
    throw InvalidArgument(
        formatted("a schedule of {} groups, but this one has {}", on_host.numel(), groups));
  const auto* const first = on_host.const_data_ptr<double>();
  targets_.assign(first, first + groups);
  step_count_ = steps;
  set_rates();
}

WarmupScheduler::WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options)
    : Schedule(optimizer),
      options_(std::move(options)),
      start_factor_(options_.start_factor ? *options_.start_factor : 1.0 / size()) {
  if (!(start_factor_ >= 0))
    throw InvalidArgument(formatted("start_factor is {}; it must not be negative", start_factor_));
  set_rates();
}

double WarmupScheduler::factor(unsigned step) const {
  if (step < options_.steps) return start_factor_ + (1 - start_factor_) * step / options_.steps;
  return options_.then ? options_.then(step - options_.steps) : 1;
}

StepSchedule::StepSchedule(torch::optim::Optimizer& optimizer, unsigned step_size, double gamma)
    : Schedule(optimizer), step_size_(step_size), gamma_(gamma) {
  if (step_size_ == 0) throw InvalidArgument("StepSchedule: step_size is 0; it must be at least 1");
}

double StepSchedule::rate(double target, unsigned step) const {
  return target * std::pow(gamma_, step / step_size_);
}

MultiStepSchedule::MultiStepSchedule(torch::optim::Optimizer& optimizer,
                                     std::vector<unsigned> milestones, double gamma)
    : Schedule(optimizer), milestones_(std::move(milestones)), gamma_(gamma) {
  set_rates();
}

double MultiStepSchedule::rate(double target, unsigned step) const {
  const auto passed = std::count_if(milestones_.begin(), milestones_.end(),
                                    [step](unsigned milestone) { return milestone <= step; });
  return target * std::pow(gamma_, passed);
}

CosineSchedule::CosineSchedule(torch::optim::Optimizer& optimizer, unsigned steps, double minimum)
    : Schedule(optimizer), steps_(steps), minimum_(minimum) {
  if (steps_ == 0) throw InvalidArgument("CosineSchedule: steps is 0; it must be at least 1");
}

double CosineSchedule::rate(double target, unsigned step) const {
  if (step == 0) return target;
  if (step >= steps_) return minimum_;
  return minimum_ + (target - minimum_) * (1 + std::cos(std::numbers::pi * step / steps_)) / 2;
}

LinearSchedule::LinearSchedule(torch::optim::Optimizer& optimizer, double start_factor,
                               double end_factor, unsigned steps)
    : Schedule(optimizer), start_factor_(start_factor), end_factor_(end_factor), steps_(steps) {
  if (steps_ == 0) throw InvalidArgument("LinearSchedule: steps is 0; it must be at least 1");
  set_rates();
}

double LinearSchedule::rate(double target, unsigned step) const {
  return target * (step >= steps_ ? end_factor_
                                  : start_factor_ + (end_factor_ - start_factor_) * step / steps_);
}

}  // namespace hvd
