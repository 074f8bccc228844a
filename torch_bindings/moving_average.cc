#include "torch_bindings/moving_average.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/shared_parameters.h"

namespace hvd {

namespace {

/// What an average adds at a time is lost in 16 bits.
at::ScalarType average_type(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16 ? at::kFloat : parameter.scalar_type();
}

/// Makes the parameter what `other`, of its type, is, and the other way round.
void exchange_values(const at::Tensor& parameter, const at::Tensor& other) {
  if (SharedParameters::contains(parameter)) {  // other ranks exchange theirs too: not the values, but whose memory is whose
    const at::Tensor kept = parameter.detach();
    parameter.set_data(other.detach());
    other.set_data(kept);
  } else {
    const at::Tensor kept = parameter.detach().clone();
    parameter.copy_(other);
    other.copy_(kept);
  }
}

}  // namespace

ExponentialMovingAverage::ExponentialMovingAverage(std::vector<at::Tensor> parameters, ExponentialMovingAverageOptions options)
    : options_(options), parameters_(std::move(parameters)) {
  if (!(options_.decay >= 0 && options_.decay < 1))
    throw InvalidArgument(formatted("decay is {}; it must be from 0 to below 1", options_.decay));
  std::unordered_map<const void*, std::size_t> places;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto [place, is_first] = places.emplace(parameters_[i].unsafeGetTensorImpl(), i);
    if (is_first) unique_.push_back(i);
    averages_.push_back(is_first ? parameters_[i].detach().to(average_type(parameters_[i]), false, /*copy=*/true)
                                 : averages_[place->second]);
  }
}

ExponentialMovingAverage::ExponentialMovingAverage(const torch::nn::Module& module, ExponentialMovingAverageOptions options)
    : ExponentialMovingAverage(module.parameters(), options) {}

void ExponentialMovingAverage::update() {
  const at::NoGradGuard no_gradient;
  const auto t = static_cast<double>(updates_++);
  const double decay = options_.warm_up ? std::min(options_.decay, (1 + t) / (10 + t)) : options_.decay;
  for (const auto i : unique_) averages_[i].lerp_(parameters_[i].detach().to(averages_[i].scalar_type()), 1 - decay);
}

void ExponentialMovingAverage::copy_to_parameters() {
  const at::NoGradGuard no_gradient;
  for (const auto i : unique_) {
    if (SharedParameters::contains(parameters_[i])) {  // other ranks may be reading them yet: the next step puts all together again
      parameters_[i].set_data(averages_[i].detach().to(parameters_[i].scalar_type(), false, /*copy=*/true));
    } else {
      parameters_[i].copy_(averages_[i]);
    }
  }
}

void ExponentialMovingAverage::exchange() {
  const at::NoGradGuard no_gradient;
  set_aside_.resize(parameters_.size());
  for (const auto i : unique_) {
    if (averages_[i].scalar_type() == parameters_[i].scalar_type()) {
      exchange_values(parameters_[i], averages_[i]);
    } else {
      const bool begins = !set_aside_[i].defined();
      if (begins) set_aside_[i] = averages_[i].to(parameters_[i].scalar_type());
      exchange_values(parameters_[i], set_aside_[i]);
      if (!begins) set_aside_[i].reset();
    }
  }
}

void ExponentialMovingAverage::save(torch::serialize::OutputArchive& archive) const {
  archive.write("updates", c10::IValue(updates_));
  for (std::size_t i = 0; i < averages_.size(); ++i) archive.write(formatted("average.{}", i), averages_[i]);
}

void ExponentialMovingAverage::load(torch::serialize::InputArchive& archive) {
  c10::IValue updates;
  archive.read("updates", updates);
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> read;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    at::Tensor average;
    archive.read(formatted("average.{}", i), average);
    TORCH_CHECK(average.sizes() == averages_[i].sizes(), "average ", i, " is of shape ", average.sizes(), ", the parameter of ",
                averages_[i].sizes());
    read.push_back(average);
  }
  for (std::size_t i = 0; i < averages_.size(); ++i) averages_[i].copy_(read[i]);
  updates_ = updates.toInt();
}

}  // namespace hvd
