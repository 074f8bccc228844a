#include "torch_bindings/gradients/gradient_arrivals.h"

#include <torch/torch.h>

#include <utility>

#include "torch_bindings/collectives/collectives.h"

namespace hvd {

/// The last number counts the ranks: one that has joined does not hear of the order.
void GradientArrivals::submit(bool are_kept) {
  if (!is_followed() || !order_.empty() || ordering_) return;
  at::Tensor places = at::zeros({static_cast<std::int64_t>(gradients_) + 1}, at::kLong);
  auto* next = places.mutable_data_ptr<std::int64_t>();
  next[gradients_] = 1;
  if (process_set_.rank() == 0 && are_kept && !arrivals_.empty()) {
    std::vector<bool> listed(gradients_, false);
    const auto list = [&](std::size_t place) {
      if (!listed[place]) *next++ = static_cast<std::int64_t>(place) + 1;
      listed[place] = true;
    };
    for (const auto place : arrivals_) list(place);
    for (std::size_t place = gradients_; place-- > 0;) list(place);
  }
  ordering_ = allreduce_async(
      places,
      {.name = name_ + "/order of arrival", .op = ReduceOp::Sum, .process_set = process_set_});
}

bool GradientArrivals::learn() {
  if (!ordering_) return false;
  const at::Tensor places = std::exchange(ordering_, std::nullopt)->wait();
  const auto* said = places.const_data_ptr<std::int64_t>();
  if (said[gradients_] != process_set_.size() || said[0] == 0) return false;
  bool is_other = false;
  for (std::size_t i = 0; i < gradients_; ++i) {
    order_.push_back(static_cast<std::size_t>(said[i] - 1));
    is_other = is_other || order_.back() != gradients_ - 1 - i;
  }
  return is_other;
}

}  // namespace hvd
