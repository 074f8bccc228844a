#include "torch_bindings/replicas/replica_gradients.h"

#include <torch/torch.h>

#include <unordered_map>

#include "torch_bindings/replicas/replica_threads.h"

namespace hvd::detail {

using Tensors = std::vector<at::Tensor>;

namespace {

/// The outputs that are trained, and their gradients on the replica's device.
void append_to(Tensors& outputs, Tensors& gradients, const ReplicaPass& replica) {
  for (std::size_t i = 0; i < replica.outputs.size(); ++i) {
    if (!replica.outputs[i].requires_grad()) continue;
    outputs.push_back(replica.outputs[i]);
    gradients.push_back(replica.gradients[i].to(replica.device));
  }
}

}  // namespace

std::vector<Tensors> gradients_in_one_pass(const std::vector<ReplicaPass>& replicas) {
  Tensors outputs, gradients, wanted;
  std::unordered_map<const void*, std::size_t> places;  // of what is wanted, each once
  for (const auto& replica : replicas) {
    for (const auto& tensor : replica.wanted)
      if (places.emplace(tensor.unsafeGetTensorImpl(), wanted.size()).second) wanted.push_back(tensor);
    append_to(outputs, gradients, replica);
  }
  Tensors found(wanted.size());
  if (!outputs.empty() && !wanted.empty())
    found = torch::autograd::grad(outputs, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  std::vector<Tensors> of_replicas;
  for (const auto& replica : replicas) {
    auto& own = of_replicas.emplace_back();
    for (const auto& tensor : replica.wanted) own.push_back(std::exchange(found[places.at(tensor.unsafeGetTensorImpl())], {}));
  }
  return of_replicas;
}

std::vector<Tensors> gradients_in_parallel(const std::vector<ReplicaPass>& replicas) {
  std::vector<at::Device> devices;
  for (const auto& replica : replicas) devices.push_back(replica.device);
  std::vector<Tensors> of_replicas(replicas.size());
  in_parallel(devices, [&](std::size_t i) {
    const auto& replica = replicas[i];
    Tensors outputs, gradients;
    append_to(outputs, gradients, replica);
    if (outputs.empty() || replica.wanted.empty()) {
      of_replicas[i].resize(replica.wanted.size());
      return;
    }
    of_replicas[i] = torch::autograd::grad(outputs, replica.wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  });
  return of_replicas;
}

}  // namespace hvd::detail
