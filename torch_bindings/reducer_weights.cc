// What each rank's gradients count in the averages of a GradientReducer. Their sum is known before the first bucket leaves, so that a
// gradient is multiplied by its share once, and all that follows (compression, shares, joined ranks) is an ordinary average.
#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/reducer.h"

namespace hvd {

void detail::check_weight(double weight) {
  constexpr double kMost = 9007199254740992;  // so that a sum is finite
  if (!(weight >= 0 && weight <= kMost))
    throw InvalidArgument(formatted("set_weight({}): it must be a number of rows or tokens, from 0 to 2^53", weight));
}

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
  weight_ = weight;
}

std::optional<double> GradientReducer::weight() const {
  const std::lock_guard lock(mutex_);
  return weight_;
}

/// Before anything of a round is submitted.
void GradientReducer::begin_round() {
  if (std::exchange(round_begun_, true)) return;
  follow_parameters(Between::NewOrder);
  if (weight_ && !buckets_.empty()) ask_for_weights();
}

/// Starts the sum; it is there, as a rule, before the first bucket is complete. It is an operation of the first bucket's kind, as only such
/// ones meet under a name; but a bucket is an average or has scales, so that none of them can be taken for it.
void GradientReducer::ask_for_weights() {
  weights_ = std::make_shared<Weights>();
  const bool scattered = !buckets_.empty() && scatters(buckets_.front());
  const std::int64_t rows = scattered ? options_.process_set.size() : 1;  // one for each rank
  weights_->own.assign(static_cast<std::size_t>(rows), *weight_);
  const AllreduceOptions terms{
      .name = buckets_.empty() ? name_ + "/weights" : buckets_.front().name, .op = ReduceOp::Sum, .process_set = options_.process_set};
  Submission submission = request(scattered ? OpKind::Reducescatter : OpKind::Allreduce, terms);
  submission.tensors.push_back({.input = weights_->own.data(), .output = &weights_->all, .dtype = DataType::Float64, .shape = {rows}});
  submission.keep_alive = std::shared_ptr<Weights>(weights_);
  weights_->pending = engine()->submit(std::move(submission), After::Return);
}

/// Waits for the sum, where there is one. Returns false where other ranks' gradients have no weights.
bool GradientReducer::learn_weights() {
  if (!weights_) return true;
  try {
    engine()->wait(*weights_->pending);
  } catch (const Mismatch&) {
    return false;
  }
  factor_ = weights_->all > 0 ? weights_->own.front() / weights_->all * options_.process_set.size() : 0;
  return true;
}

/// What counts nothing is zeros: the mean of no rows is not a number.
at::Tensor GradientReducer::weighed(const at::Tensor& values) const {
  if (factor_ == 0) return at::zeros_like(values);
  return factor_ == 1 ? values : values * factor_;
}

/// In place, before the bucket is submitted.
void GradientReducer::weigh(Bucket& bucket) {
  if (factor_ == 1) return;
  std::vector<at::Tensor> all;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (!slot.present || slot.sparse || slot.weighed != Weighed::No) continue;
    all.push_back(slot.given.defined() ? slot.given : slot.wire);
    const at::Tensor& gradient = slot.named.parameter.grad();
    const bool itself = slot.given.defined() || (gradient.defined() && gradient.is_alias_of(slot.wire));
    slot.weighed = itself ? Weighed::Itself : Weighed::Copy;
  }
  if (all.empty()) return;
  factor_ == 0 ? at::_foreach_zero_(all) : at::_foreach_mul_(all, factor_);
  for (const auto index : bucket.slots)
    if (slots_[index].weighed == Weighed::Itself) slots_[index].mark.set(slots_[index].named.parameter.grad());
}

/// After a round that has failed: what was sent in vain is as backward has left it, so that it can be reduced again.
void GradientReducer::put_back_weighed() {
  for (auto& slot : slots_) {
    if (std::exchange(slot.weighed, Weighed::No) != Weighed::Itself || factor_ == 0) continue;
    const auto& pending = buckets_[slot.bucket].pending;
    if (pending && pending->status.ok()) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (gradient.defined()) gradient.div_(factor_);
  }
}

}  // namespace hvd
