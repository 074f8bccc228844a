#pragma once
/// LocalGradients tell whether parameters have been changed while gradients stayed on this rank
/// alone (passes under no_sync(), or of the module past its wrapper): whoever steps by those
/// changes the parameters that have got one. So a part of some of them is remembered. Version
/// counters would not do: LibTorch's SGD writes through `data()`. Thread: one at a time. Holds the
/// parameters. Throws nothing.
// Tested in tests/torch_bindings/what_if/what_if_ddp_replicas_test.cc

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "torch_bindings/parameters/shared_parameters.h"

namespace hvd::detail {

/// The parameters with local gradients, as they were.
class LocalGradients {
 public:
  void note(const std::string& name, const at::Tensor& parameter) {
    if (samples_.size() < kSamples) samples_.push_back({name, parameter, part_of(parameter)});
  }
  /// Returns the name of a parameter that is not what it was; null if there is none, or if all
  /// ranks have got the same parameters since (a broadcast, a checkpoint).
  [[nodiscard]] const std::string* changed() const {
    if (SharedParameters::writes_alike() != writes_alike_) return nullptr;
    const auto found = std::find_if(samples_.begin(), samples_.end(),
                                    [](const Sample& sample) { return sample.has_changed(); });
    return found == samples_.end() ? nullptr : &found->name;
  }

 private:
  /// A step changes all parameters that have a gradient, and most of their elements.
  static constexpr std::size_t kSamples = 4;
  static constexpr std::int64_t kElements = 1024;

  struct Sample {
    std::string name;
    at::Tensor parameter;
    at::Tensor part;  ///< a copy of its first elements
    [[nodiscard]] bool has_changed() const {
      const at::Tensor now = part_of(parameter);
      const bool is_moved = now.scalar_type() != part.scalar_type() ||
                            now.device() != part.device() || now.sizes() != part.sizes();
      // in bytes: no number differs from itself
      return !is_moved && !at::equal(now.view(at::kByte), part.view(at::kByte));
    }
  };
  static at::Tensor part_of(const at::Tensor& parameter) {
    const at::NoGradGuard no_gradient;
    const at::Tensor whole = parameter.detach();
    const std::int64_t count = std::min(whole.numel(), kElements);
    if (whole.is_non_overlapping_and_dense())
      return whole.as_strided({count}, {1}, whole.storage_offset()).clone();
    return whole.reshape({-1}).narrow(0, 0, count).clone();
  }

  std::vector<Sample> samples_;
  const std::uint64_t writes_alike_ = SharedParameters::writes_alike();
};

}  // namespace hvd::detail
