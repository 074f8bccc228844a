#include "torch_bindings/gradients/gradient_bucket.h"

#include <torch/torch.h>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"

namespace hvd {

namespace {

std::vector<const NamedParameter*> parameters_of(const std::vector<GradientSlot*>& slots) {
  std::vector<const NamedParameter*> named;
  for (const auto* slot : slots) named.push_back(&slot->named);
  return named;
}

}  // namespace

bool GradientSlot::is_zero() const {
  return gradient().layout() == at::kStrided && !gradient().any().item<bool>();
}

void GradientSlot::follow_layout(bool sparse_as_dense) {
  if (!gradient().is_sparse()) return;
  if (sparse_as_dense || gradient().sparse_dim() == 0) {
    gradient() = gradient().to_dense();
  } else {
    sparse_dims = gradient().sparse_dim();
  }
}

void GradientSlot::share_out(int ranks) {
  if (std::exchange(reduced, false) && ranks > 1 && gradient().defined() && !is_replaced())
    gradient().div_(ranks);
}

void GradientSlot::convert() {
  const at::Tensor& parameter = named.parameter;
  if (!gradient().defined()) return;
  if (gradient().sizes() != parameter.sizes())
    throw InvalidArgument(
        formatted("parameter '{}' is {} now, and its gradient {}; call zero_grad() when a "
                  "parameter gets another shape",
                  named.name, to_string(Shape(parameter.sizes().vec())),
                  to_string(Shape(gradient().sizes().vec()))));
  gradient() = gradient().to(parameter.device(), parameter.scalar_type());
  set_mark();
}

GradientBucket::GradientBucket(std::string called, std::vector<GradientSlot*> members,
                               const BucketMemory::Terms& terms)
    : name(std::move(called)),
      slots(std::move(members)),
      memory(parameters_of(slots), terms),
      round(slots.size()) {
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i]->member = i;
}

void GradientBucket::take_in_together(bool are_thrown_away) {
  const bool other_streams = streams.join(parameter().device());
  if (!memory.is_taken_together()) return;
  std::vector<std::size_t> members;
  for (const auto* slot : slots)
    if (round.is_present(slot->member) && !slot->sparse_dims) members.push_back(slot->member);
  memory.take_in_together(members, are_thrown_away, other_streams);
  if (are_thrown_away) return;
  for (auto* slot : slots)
    if (memory.is_home(slot->member) && round.is_present(slot->member)) slot->set_mark();
}

void GradientBucket::weigh(const GradientWeights& weights) {
  using Weighed = GradientSlot::Weighed;
  if (weights.factor() == 1) return;
  std::vector<at::Tensor> all;
  for (auto* slot : slots) {
    if (!round.is_present(slot->member) || slot->sparse_dims || slot->weighed != Weighed::No)
      continue;
    all.push_back(memory.sent(slot->member));
    slot->weighed = memory.sends_gradient(slot->member) ? Weighed::Itself : Weighed::Copy;
  }
  if (all.empty()) return;
  weights.factor() == 0 ? at::_foreach_zero_(all) : at::_foreach_mul_(all, weights.factor());
  for (auto* slot : slots)
    if (slot->weighed == Weighed::Itself) slot->set_mark();
}

void GradientBucket::put_back_weighed(double factor) {
  const bool was_sent = round.pending() && round.pending()->status.ok();
  for (auto* slot : slots) {
    const auto weighed = std::exchange(slot->weighed, GradientSlot::Weighed::No);
    if (weighed == GradientSlot::Weighed::Itself && factor != 0 && !was_sent &&
        slot->gradient().defined())
      slot->gradient().div_(factor);
  }
}

void GradientBucket::put_given_back() {
  for (auto* slot : slots)
    if (memory.put_given_back(slot->member)) slot->set_mark();
}

void GradientBucket::give_back(double share) {
  std::vector<std::size_t> members;
  for (const auto* slot : slots) {
    const std::size_t member = slot->member;
    if (!round.pending()->present_anywhere[member] || round.is_kept(member)) continue;
    // what the others have together, which is the same on all ranks, and what is to come
    if (round.is_late(member)) {
      slot->gradient().add_(memory.result(member).to(slot->gradient().scalar_type()), share);
    } else {
      members.push_back(member);
    }
  }
  memory.give_back(members);
}

bool GradientBucket::learn_sparse(const ProcessSet& process_set) {
  at::Tensor known = at::zeros({static_cast<std::int64_t>(slots.size())}, at::kLong);
  for (const auto* slot : slots) known[static_cast<std::int64_t>(slot->member)] = slot->sparse_dims;
  const AllreduceOptions most{
      .name = name + "/sparse", .op = ReduceOp::Max, .process_set = process_set};
  const AllreduceOptions least{
      .name = name + "/not sparse", .op = ReduceOp::Min, .process_set = process_set};
  at::Tensor anywhere;
  at::Tensor everywhere;
  try {
    anywhere = allreduce(known, most);
    everywhere = allreduce(known, least);
  } catch (const Mismatch&) {
    return false;  // not even as many parameters
  }
  for (auto* slot : slots)
    slot->sparse_dims = anywhere[static_cast<std::int64_t>(slot->member)].item<std::int64_t>();
  return !anywhere.equal(everywhere);
}

}  // namespace hvd
