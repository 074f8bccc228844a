#include "torch_bindings/shared_buffers.h"

#include <torch/torch.h>

#include <string_view>

#include "torch_bindings/collectives.h"
#include "torch_bindings/join.h"
#include "torch_bindings/unique_parameters.h"

namespace hvd::detail {

namespace {
bool is_running_statistic(std::string_view name) { return name.ends_with("running_mean") || name.ends_with("running_var"); }
}  // namespace

SharedBuffers::Buffers SharedBuffers::buffers(bool count_as_change) const {
  Buffers all;
  for (const auto& [name, buffer] : unique_parameters(module_->named_buffers().pairs())) {
    if (!buffer.defined()) continue;
    // The same memory with a version counter of its own.
    all.tensors.push_back(count_as_change && !is_running_statistic(name) ? buffer : buffer.variable_data());
    all.names.push_back(name);
  }
  return all;
}

SharedBuffers::Sharing SharedBuffers::start(Buffers buffers) const {
  return grouped_broadcast_async_(std::move(buffers.tensors), std::move(buffers.names),
                                  {.name = name_, .root_rank = process_set_.ranks().front(), .process_set = process_set_});
}

/// A sum of bytes, all but the root's zero: a broadcast would need the ranks that have joined, too.
void SharedBuffers::share_of_training(Buffers buffers, const JoinRounds& rounds) const {
  const bool is_root = rounds.first_training() == hvd::rank();
  const at::Device device = buffers.tensors.front().device();
  std::vector<at::Tensor> parts;
  for (const auto& tensor : buffers.tensors) parts.push_back(tensor.detach().to(device).contiguous().reshape({-1}).view(at::kByte));
  at::Tensor bytes = torch::cat(parts);
  if (!is_root) bytes.zero_();
  allreduce_(bytes, {.name = name_ + " of ranks that train", .op = ReduceOp::Sum, .process_set = process_set_});
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    at::Tensor& tensor = buffers.tensors[i];
    const at::Tensor part = bytes.slice(0, begin, begin + parts[i].numel()).clone();  // aligned for its type
    begin += parts[i].numel();
    if (!is_root) tensor.copy_(part.view(tensor.scalar_type()).reshape(tensor.sizes()));
  }
}

void SharedBuffers::share(const JoinRounds* rounds) const {
  const at::NoGradGuard no_gradient;
  Buffers all = buffers(true);
  if (all.tensors.empty()) return;
  if (rounds != nullptr) return share_of_training(std::move(all), *rounds);
  static_cast<void>(start(std::move(all))->wait());
}

SharedBuffers::Sharing SharedBuffers::start(const JoinRounds* rounds) const {
  const at::NoGradGuard no_gradient;
  Buffers all = buffers(false);
  if (all.tensors.empty()) return {};
  if (rounds == nullptr) return start(std::move(all));
  share_of_training(std::move(all), *rounds);
  return {};
}

}  // namespace hvd::detail
