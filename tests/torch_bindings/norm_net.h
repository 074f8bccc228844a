#pragma once
/// What the tests of DistributedDataParallel off its usual path share: a small model with or
/// without batch normalisation, with the same weights on all ranks, and its loss on the batch of a
/// rank at a step.

#include <memory>

#include "tests/torch_bindings/support.h"

namespace hvd::test::norm_net {

using at::kDouble, at::kFloat;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using torch::nn::Sequential;

inline at::Tensor input(int rank, int step) { return data({5, 6}, kDouble, rank, step) + rank; }
inline at::Tensor target(int rank, int step) { return data({5, 3}, kDouble, rank, step + 1); }
inline Sequential model(bool norm) {
  Sequential net(Linear(6, 8));
  if (norm) net->push_back(BatchNorm1d(8));
  net->push_back(Linear(8, 3));
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  net->to(kDouble);
  for (auto& parameter : net->named_parameters()) {
    const bool is_scale = parameter->dim() == 1 && parameter.key().ends_with("weight");
    if (!is_scale) parameter->copy_(data(parameter->sizes(), kDouble, 0, variant++) * 0.3);
  }
  return net;
}
template <class Net>
at::Tensor loss(Net& net, int rank, int step) {
  return torch::mse_loss(net.forward(input(rank, step)), target(rank, step));
}
inline bool is_same_on_all_ranks(const torch::nn::Module& net) {
  bool same = true;
  for (const auto& parameter : net.parameters()) same = same_on_all_ranks(parameter) && same;
  for (const auto& buffer : net.buffers()) same = same_on_all_ranks(buffer) && same;
  return same;
}
inline BatchNorm1d norm_of(Sequential& net) {
  return BatchNorm1d(std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(net->ptr(1)));
}
using Ddp = hvd::DistributedDataParallel<torch::nn::SequentialImpl>;

}  // namespace hvd::test::norm_net
