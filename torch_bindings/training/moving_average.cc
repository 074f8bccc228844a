#include "torch_bindings/training/moving_average.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/parameters/shared_parameters.h"
#include "torch_bindings/precision/master_copies.h"

namespace hvd {

namespace {

/// Returns the type of an average: what it adds at a time is lost in 16 bits.
at::ScalarType average_type(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16
             ? at::kFloat
             : parameter.scalar_type();
}

/// The parameter's master where there is one, else what it is.
at::Tensor value_of(const at::Tensor& parameter) {
  const at::Tensor master = detail::MasterCopy::is_for(parameter)
                                ? detail::MasterCopies::master_of(parameter)
                                : at::Tensor();
  return master.defined() ? master : parameter.detach();
}

/// Gives the parameter these values. If it lies in shared memory it leaves that, for a `copy` of
/// them or for where they lie.
void become(const at::Tensor& parameter, const at::Tensor& value, bool copy) {
  // other ranks may be reading that memory; the next step puts all there again
  if (SharedParameters::contains(parameter)) {
    parameter.set_data(value.to(parameter, /*non_blocking=*/false, copy));
  } else {
    parameter.copy_(value);
  }
}

}  // namespace

ExponentialMovingAverage::ExponentialMovingAverage(std::vector<at::Tensor> parameters,
                                                   ExponentialMovingAverageOptions options)
    : options_(options), parameters_(std::move(parameters)) {
  if (!(options_.decay >= 0 && options_.decay < 1))
    throw InvalidArgument(formatted("decay is {}; it must be from 0 to below 1", options_.decay));
  std::unordered_map<const void*, std::size_t> places;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto [place, is_first] = places.emplace(parameters_[i].unsafeGetTensorImpl(), i);
    if (is_first) unique_.push_back(i);
    averages_.push_back(
        is_first ? parameters_[i].detach().to(average_type(parameters_[i]), false, /*copy=*/true)
                 : averages_[place->second]);
  }
  begin_with_broadcasts();
}

ExponentialMovingAverage::ExponentialMovingAverage(const torch::nn::Module& module,
                                                   ExponentialMovingAverageOptions options)
    : ExponentialMovingAverage(module.parameters(), options) {
  std::unordered_set<const void*> known;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined() || !known.insert(buffer.unsafeGetTensorImpl()).second) continue;
    // of any type after Module::to()
    const bool counts = !buffer.is_floating_point() || item.key().ends_with("num_batches_tracked");
    buffers_.push_back(
        {buffer, buffer.detach().to(average_type(buffer), false, /*copy=*/true), counts, {}});
  }
  begin_with_broadcasts();
}

/// The averages begin with what all ranks have, also if that comes later.
void ExponentialMovingAverage::begin_with_broadcasts() {
  std::vector<std::pair<at::Tensor, at::Tensor>> all;  // with their averages
  for (const auto i : unique_) all.emplace_back(parameters_[i], averages_[i]);
  for (const auto& buffer : buffers_) all.emplace_back(buffer.buffer, buffer.average);
  begins_ = std::make_shared<const std::function<void()>>([all = std::move(all)] {
    const at::NoGradGuard no_gradient;
    for (const auto& [value, average] : all) average.copy_(value_of(value));
  });
  SharedParameters::on_written_alike(begins_);
}

void ExponentialMovingAverage::update() {
  const at::NoGradGuard no_gradient;
  begins_.reset();
  const auto t = static_cast<double>(updates_++);
  const double decay =
      options_.warm_up ? std::min(options_.decay, (1 + t) / (10 + t)) : options_.decay;
  for (const auto i : unique_) {
    const at::Tensor now = value_of(parameters_[i]).to(averages_[i]);
    now.is_floating_point() || now.is_complex() ? averages_[i].lerp_(now, 1 - decay)
                                                : averages_[i].copy_(now);
  }
  for (auto& [buffer, average, counts, kept] : buffers_) {
    const at::Tensor now = buffer.detach().to(average);
    if (counts) {
      average.copy_(now);
    } else {  // what has not changed stays, also if it is infinite (masks)
      average.copy_(at::where(average.eq(now), average, at::lerp(average, now, 1 - decay)));
    }
  }
}

void ExponentialMovingAverage::copy_to_parameters() {
  const at::NoGradGuard no_gradient;
  for (const auto i : unique_) become(parameters_[i], averages_[i], /*copy=*/true);
  for (auto& buffer : buffers_) buffer.buffer.copy_(buffer.average);
}

void ExponentialMovingAverage::put_in() {
  const at::NoGradGuard no_gradient;
  set_aside_.resize(parameters_.size());
  for (const auto i : unique_) {
    const at::Tensor now = parameters_[i].detach();
    // what lies in shared memory stays there, and the parameter leaves it
    set_aside_[i] = SharedParameters::contains(parameters_[i]) ? now : now.clone();
    become(parameters_[i], averages_[i], /*copy=*/true);
  }
  for (auto& [buffer, average, counts, kept] : buffers_) {
    // no write that a DistributedDataParallel sees
    if (at::equal(buffer, average.to(buffer))) continue;
    kept = buffer.detach().clone();
    buffer.copy_(average);
  }
}

void ExponentialMovingAverage::take_out() {
  const at::NoGradGuard no_gradient;
  for (const auto i : unique_) become(parameters_[i], set_aside_[i], /*copy=*/false);
  set_aside_.clear();
  for (auto& [buffer, average, counts, kept] : buffers_)
    if (kept.defined()) buffer.copy_(std::exchange(kept, {}));
}

std::vector<at::Tensor> ExponentialMovingAverage::of_rank() const {
  std::vector<at::Tensor> all;
  for (const auto& buffer : buffers_) all.push_back(buffer.average);
  return all;
}

void ExponentialMovingAverage::save(torch::serialize::OutputArchive& archive) const {
  archive.write("updates", c10::IValue(updates_));
  for (std::size_t i = 0; i < averages_.size(); ++i)
    archive.write(formatted("average.{}", i), averages_[i]);
  archive.write("buffers", c10::IValue(static_cast<std::int64_t>(buffers_.size())));
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    archive.write(formatted("buffer.{}", i), buffers_[i].average);
}

void ExponentialMovingAverage::load(torch::serialize::InputArchive& archive) {
  const std::int64_t updates = detail::value_at(archive, "updates").toInt();
  const at::NoGradGuard no_gradient;
  std::vector<std::pair<at::Tensor, at::Tensor>> read;
  const auto take = [&](const std::string& key, const at::Tensor& average) {
    at::Tensor value;
    archive.read(key, value);
    TORCH_CHECK(value.sizes() == average.sizes(), key, " is of shape ", value.sizes(),
                ", what it is the average of ", average.sizes());
    read.emplace_back(average, value);
  };
  for (std::size_t i = 0; i < averages_.size(); ++i) take(formatted("average.{}", i), averages_[i]);
  at::Tensor more;
  TORCH_CHECK(!archive.try_read(formatted("average.{}", averages_.size()), more),
              "there are averages of more parameters than the model's ", averages_.size());
  // a file that was written before there were any has none
  if (c10::IValue buffers; archive.try_read("buffers", buffers)) {
    const auto count = static_cast<std::size_t>(buffers.toInt());
    TORCH_CHECK(count == buffers_.size(), "there are averages of ", count,
                " buffers, and the model has ", buffers_.size());
    for (std::size_t i = 0; i < count; ++i) take(formatted("buffer.{}", i), buffers_[i].average);
  }
  for (const auto& [average, value] : read) average.copy_(value);
  const bool is_undone = updates_ > 0 && updates == 0;  // a Checkpoint::load that failed
  updates_ = updates;
  begins_.reset();
  if (is_undone) begin_with_broadcasts();
}

}  // namespace hvd
