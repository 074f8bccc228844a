// Where the gradients of a GradientReducer are multiplied by their ranks' weights.
#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "torch_bindings/reducer.h"

namespace hvd {

void GradientReducer::refuse_late_weight() const {
  const std::lock_guard lock(mutex_);
  const bool passes = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.passes > 0; });
  if (round_begun_ || passes)
    throw InvalidArgument(
        "set_weight(): backward has begun, and gradients may have left; call it before the step's first backward(), with the number of all "
        "rows or tokens of the step");
}

void GradientReducer::set_weight(std::optional<double> weight) {
  refuse_late_weight();
  const std::lock_guard lock(mutex_);
  weights_.set(weight);
}

std::optional<double> GradientReducer::weight() const {
  const std::lock_guard lock(mutex_);
  return weights_.own();
}

/// Before anything of a round is submitted. The sum is there, as a rule, before the first bucket is complete.
void GradientReducer::begin_round() {
  if (std::exchange(round_begun_, true)) return;
  follow_parameters(Between::NewOrder);
  if (!buckets_.empty()) ask_for_weights();
}

void GradientReducer::tell_weight() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  if (weights_.own() && !synchronized_) begin_round();
}

void GradientReducer::ask_for_weights() {
  const bool scattered = !buckets_.empty() && scatters(buckets_.front());
  weights_.ask(buckets_.empty() ? name_ + "/weights" : buckets_.front().name, scattered);
}

/// In place, before the bucket is submitted.
void GradientReducer::weigh(Bucket& bucket) {
  if (weights_.factor() == 1) return;
  std::vector<at::Tensor> all;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (!bucket.round.is_present(slot.member) || slot.sparse || slot.weighed != Weighed::No) continue;
    all.push_back(bucket.memory.sent(slot.member));
    slot.weighed = bucket.memory.sends_gradient(slot.member) ? Weighed::Itself : Weighed::Copy;
  }
  if (all.empty()) return;
  weights_.factor() == 0 ? at::_foreach_zero_(all) : at::_foreach_mul_(all, weights_.factor());
  for (const auto index : bucket.slots)
    if (slots_[index].weighed == Weighed::Itself) slots_[index].mark.set(slots_[index].named.parameter.grad());
}

/// After a round that has failed: what was sent in vain is as backward has left it, so that it can be reduced again.
void GradientReducer::put_back_weighed() {
  for (auto& slot : slots_) {
    if (std::exchange(slot.weighed, Weighed::No) != Weighed::Itself || weights_.factor() == 0) continue;
    const auto& pending = buckets_[slot.bucket].round.pending();
    if (pending && pending->status.ok()) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (gradient.defined()) gradient.div_(weights_.factor());
  }
}

}  // namespace hvd
