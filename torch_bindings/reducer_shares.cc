// A GradientReducer that leaves each rank its share of the gradients alone: a bucket has memory from its first gradient on until it is
// reduced, and `.grad` ends with it.
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>

#include "hvd/base/text.h"
#include "torch_bindings/gradient_keeper.h"
#include "torch_bindings/reducer.h"

namespace hvd {

namespace {

/// Stands in `.grad` for a gradient that is reduced already, while other buckets are still to come.
at::Tensor stand_in(const at::Tensor& parameter) {
  return at::zeros({}, parameter.options().requires_grad(false)).expand(parameter.sizes());
}

}  // namespace

void GradientReducer::keep_shares(GradientKeeper* keeper) {
  const std::lock_guard lock(mutex_);
  keeper_ = keeper;
  memory_terms_.go_in_parts = keeper != nullptr;
  shares_kept_ = false;
  const at::NoGradGuard no_gradient;
  if (keeper_ == nullptr) return make_room();
  for (auto& bucket : buckets_) bucket.memory.give_up();
}

std::vector<std::vector<at::Tensor>> GradientReducer::parameters_by_bucket() const {
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& bucket : buckets_) {
    auto& parameters = all.emplace_back();
    for (const auto index : bucket.slots) parameters.push_back(slots_[index].named.parameter);
  }
  return all;
}

/// Whether the bucket goes as a reducescatter, in which each rank is sent its part alone. NCCL makes all parts as long as the longest:
/// where whole parameters are kept, so that one rank may have all of a bucket, an allreduce on a GPU sends less.
bool GradientReducer::scatters(const Bucket& bucket) const {
  if (keeper_ == nullptr) return false;
  if (slots_[bucket.slots.front()].named.parameter.is_cpu()) return true;
  std::vector<std::int64_t> parts(static_cast<std::size_t>(options_.process_set.size()), 0);
  std::int64_t all = 0;
  for (const auto index : bucket.slots) {
    const auto& of_one = keeper_->parts(slots_[index].named.parameter);
    std::transform(of_one.begin(), of_one.end(), parts.begin(), parts.begin(), std::plus<>());
    all += slots_[index].named.parameter.numel();
  }
  return *std::max_element(parts.begin(), parts.end()) * static_cast<std::int64_t>(parts.size()) <= 2 * all;
}

/// This rank's part of the result goes where it lies in the gradient: nobody else reads that of it.
void GradientReducer::scatter(const Slot& slot, TensorArgument& argument) const {
  static std::byte nowhere;
  if (argument.shape.empty()) argument.shape = {1};
  argument.splits = keeper_->parts(slot.named.parameter);
  const std::int64_t elements = element_count(argument.shape);
  if (std::accumulate(argument.splits.begin(), argument.splits.end(), std::int64_t{0}) != elements) {  // sparse, or of another shape now
    std::fill(argument.splits.begin(), argument.splits.end(), 0);
    argument.splits.front() = elements;
  }
  const auto own = argument.splits.begin() + options_.process_set.rank();
  const auto before = static_cast<std::size_t>(std::accumulate(argument.splits.begin(), own, std::int64_t{0}));
  if (argument.output == nullptr) argument.output = &nowhere;
  argument.output = static_cast<std::byte*>(argument.output) + before * element_bytes(argument.dtype);
}

/// Before a gradient of the bucket is taken in. On a GPU gradients stay where autograd has made them.
void GradientReducer::open(Bucket& bucket) {
  if (keeper_ == nullptr || bucket.memory.has_room() || !slots_[bucket.slots.front()].named.parameter.is_cpu()) return;
  BucketMemory::make_room({&bucket.memory}, false, nullptr);
}

/// What the bucket's round has given goes to who keeps it. `early`: other buckets are still to come, and what stands in `.grad` shows what
/// a user makes of it.
void GradientReducer::put_away(Bucket& bucket, Round round, bool early) {
  for (std::size_t i = 0; i < bucket.slots.size(); ++i) {
    Slot& slot = slots_[bucket.slots[i]];
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (bucket.round.state() != RoundState::PutAway && round != Round::ThrownAway && bucket.round.pending()->present_anywhere[i])
      keeper_->keep(slot.named.parameter, bucket.memory.result(i));
    if (bucket.round.is_late(i) || round == Round::ThrownAway) continue;  // it is what has come since
    if (early && bucket.round.is_present(i)) {
      gradient = stand_in(slot.named.parameter);
    } else {
      gradient.reset();
    }
    slot.mark.set(gradient);
  }
  bucket.memory.give_up();
  bucket.round.put_away();
}

/// While backward runs: the buckets that are reduced already do not keep their memory until the others are.
void GradientReducer::put_away_what_is_done() {
  if (keeper_ == nullptr) return;
  for (auto& bucket : buckets_) {
    if (bucket.round.state() == RoundState::PutAway || !bucket.memory.has_room() || !bucket.round.is_reduced()) continue;
    wait_for(bucket, Round::Kept);
    put_away(bucket, Round::Kept, true);
  }
}

/// After a round that was thrown away or has failed: what some of its buckets gave counts no more than what the others did.
void GradientReducer::drop_shares() {
  if (keeper_ == nullptr) return;
  for (auto& slot : slots_) {
    keeper_->drop(slot.named.parameter);
    const bool stands_in = round_of(slot).state() == RoundState::PutAway && round_of(slot).is_present(slot.member);
    if (stands_in && slot.mark.since(slot.named.parameter.grad()) == detail::GradientMark::Since::Same)
      slot.named.parameter.mutable_grad().reset();
  }
}

/// A gradient that comes when those before it are kept already: it would be added to what nobody may have wanted any more.
void GradientReducer::refuse_with_shares(const Slot& slot) {
  if (keeper_ == nullptr) return;
  if (shares_kept_)
    refuse(
        formatted("gradient of '{}': with shard_gradients the gradients of the last backward pass are reduced and in shares already; call "
                  "step() or the optimizer's zero_grad() before the next one (backward_passes_per_step adds up several)",
                  slot.named.name));
  if (slot.named.parameter.grad().is_sparse() && !options_.sparse_as_dense)
    refuse(formatted(
        "gradient of '{}': it is sparse, and shard_gradients has shares of dense ones only; set sparse_as_dense, or shard_optimizer_state "
        "instead",
        slot.named.name));
}

/// A user has put gradients where there were none any more: they would be added to the shares.
void GradientReducer::refuse_replaced() const {
  if (!shares_kept_ || !synchronized_) return;
  throw InvalidArgument(
      "with shard_gradients the gradients are in shares after synchronize(), and a gradient that is put into `.grad` then would be added "
      "to them: change gradient_shares() instead, or step under skip_synchronize()");
}

}  // namespace hvd
