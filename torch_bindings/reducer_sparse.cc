// Sparse gradients of a GradientReducer: they travel as indices and values, each on its own, after the buckets.
#include <torch/torch.h>

#include "hvd/base/text.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/reducer.h"
#include "torch_bindings/tensors.h"

namespace hvd {

/// Whether that brought anything new to any rank. All ranks of the set must call it.
bool GradientReducer::learn_sparse(Bucket& bucket) {
  at::Tensor known = at::zeros({static_cast<std::int64_t>(bucket.slots.size())}, at::kInt);
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (slots_[bucket.slots[i]].sparse) known[static_cast<std::int64_t>(i)] = 1;
  const AllreduceOptions most{.name = bucket.name + "/sparse", .op = ReduceOp::Max, .process_set = options_.process_set};
  const AllreduceOptions least{.name = bucket.name + "/not sparse", .op = ReduceOp::Min, .process_set = options_.process_set};
  at::Tensor anywhere;
  at::Tensor everywhere;
  try {
    anywhere = allreduce(known, most);
    everywhere = allreduce(known, least);
  } catch (const Mismatch&) {
    return false;  // not even as many parameters
  }
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (anywhere[static_cast<std::int64_t>(i)].item<int>() != 0) slots_[bucket.slots[i]].sparse = true;
  return !anywhere.equal(everywhere);
}

void GradientReducer::reduce_sparse(Round round) {
  std::vector<std::pair<Slot*, Handle<at::Tensor>>> under_way;
  for (auto& slot : slots_) {
    if (!slot.sparse) continue;
    if (round != Round::ThrownAway) share_out(slot);
    const at::Tensor& parameter = slot.named.parameter;
    const at::Tensor& gradient = parameter.grad();
    at::Tensor mine = !gradient.defined()    ? at::zeros_like(parameter, parameter.options().requires_grad(false)).to_sparse(1)
                      : gradient.is_sparse() ? gradient
                                             : gradient.to_sparse(1);
    if (weights_.are_asked()) mine = weights_.weighed(mine);
    AllreduceOptions options{.name = formatted("{}/sparse gradient of {}", name_, slot.named.name),
                             .process_set = options_.process_set,
                             .compression = options_.compression};
    scale(options);
    under_way.emplace_back(&slot, sparse_allreduce_async(mine, options));
  }
  for (auto& [slot, handle] : under_way) {
    const at::Tensor sum = handle.wait();
    if (round == Round::ThrownAway) continue;
    at::Tensor& gradient = slot->named.parameter.mutable_grad();
    if (gradient.defined() || sum._nnz() > 0) gradient = sum;
  }
}

}  // namespace hvd
