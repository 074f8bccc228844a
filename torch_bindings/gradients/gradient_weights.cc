#include "torch_bindings/gradients/gradient_weights.h"

#include <torch/torch.h>

#include <map>
#include <mutex>
#include <utility>

#include "hvd/api/request.h"
#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"

namespace hvd {

namespace {

/// The weights that are set at present, with the worlds that they are for.
struct PresentWeights {
  std::mutex mutex;
  std::map<const GradientWeights*, std::pair<std::uint64_t, double>> all;
};
PresentWeights& present_weights() {
  static auto* const all = new PresentWeights;  // reducers may end after statics
  return *all;
}

}  // namespace

detail::PresentWeight detail::present_weight() {
  auto& [mutex, all] = present_weights();
  const std::uint64_t here = current_world_number();
  const std::lock_guard lock(mutex);
  std::optional<double> found;
  for (const auto& [who, set] : all) {
    const auto& [world, weight] = set;
    if (world == here && found.value_or(weight) != weight) return {.is_clear = false};
    if (world == here) found = weight;
  }
  return {.value = found.value_or(1)};
}

GradientWeights::GradientWeights(ProcessSet process_set)
    : process_set_(std::move(process_set)), world_(current_world_number()) {}

void GradientWeights::set(std::optional<double> weight) {
  if (!own_ && !weight) return;
  own_ = weight;
  auto& [mutex, all] = present_weights();
  const std::lock_guard lock(mutex);
  if (own_) {
    all[this] = {world_, *own_};
  } else {
    all.erase(this);
  }
}

void detail::check_weight(double weight) {
  constexpr double kMost = 9007199254740992;  // so that a sum is finite
  if (!(weight >= 0 && weight <= kMost))
    throw InvalidArgument(
        formatted("set_weight({}): it must be a number of rows or tokens, from 0 to 2^53", weight));
}

void GradientWeights::ask(const std::string& name, bool scattered) {
  if (!own_) return;
  round_ = std::make_shared<Round>();
  const std::int64_t rows = scattered ? process_set_.size() : 1;  // one for each rank
  round_->own.assign(static_cast<std::size_t>(rows), *own_);
  Submission submission =
      request(scattered ? OpKind::Reducescatter : OpKind::Allreduce,
              AllreduceOptions{.name = name, .op = ReduceOp::Sum, .process_set = process_set_});
  submission.tensors.push_back({.input = round_->own.data(),
                                .output = &round_->all,
                                .dtype = DataType::Float64,
                                .shape = {rows}});
  submission.keep_alive = std::shared_ptr<Round>(round_);
  round_->pending = engine()->submit(std::move(submission), After::Return);
}

bool GradientWeights::learn() {
  if (!round_) return true;
  try {
    engine()->wait(*round_->pending);
  } catch (const Mismatch&) {
    return false;
  }
  factor_ = round_->all > 0 ? round_->own.front() / round_->all * process_set_.size() : 0;
  return true;
}

at::Tensor GradientWeights::weighed(const at::Tensor& values) const {
  if (factor_ == 0) return at::zeros_like(values);
  return factor_ == 1 ? values : values * factor_;
}

}  // namespace hvd
