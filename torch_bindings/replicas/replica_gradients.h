#pragma once
/// The gradients of all replicas of a module (torch_bindings/replicas/data_parallel.h). Called in a backward pass, by a thread of
/// autograd's. Throws what autograd throws.

#include <ATen/core/Tensor.h>

#include <vector>

namespace hvd::detail {

/// A ReplicaPass is the forward pass of one replica.
struct ReplicaPass {
  at::Device device;
  std::vector<at::Tensor> outputs;    ///< with their graphs; those that lead to nothing trained are left out
  std::vector<at::Tensor> gradients;  ///< of the outputs, on any device
  std::vector<at::Tensor> wanted;     ///< leaves of the graph, whose gradients are asked for; replicas may have some in common
};

/// Returns for each replica the gradients of what it wants; undefined where there is none. What several replicas want is given to the first
/// of them, the sum over all. One pass for all: autograd has a thread for each GPU, and the calling one is one of them, which must not wait
/// for a thread that asks for a pass of its own.
std::vector<std::vector<at::Tensor>> gradients_in_one_pass(const std::vector<ReplicaPass>& replicas);
/// Returns the same, but each gives what it wants its own share. On the CPU, where a pass runs in the thread that asks for it: each
/// replica's is in a thread of its own.
std::vector<std::vector<at::Tensor>> gradients_in_parallel(const std::vector<ReplicaPass>& replicas);

}  // namespace hvd::detail
