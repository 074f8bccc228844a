#pragma once
/// The passes of a module's replicas (torch_bindings/replicas/data_parallel.h): threads in which
/// they run at the same time, one for each replica, and the gradients of all. Threads are joined
/// before a call returns; several threads may call at once. Gradients are asked for in a backward
/// pass, by a thread of autograd's. Throws what the work throws, and what autograd throws.
// Tested in tests/torch_bindings/training/training_helpers_test.cc

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace hvd::detail {

/// For a thread that works with LibTorch for the first time: its number of threads is then not that
/// of the workers of another one's pass.
void look_at_number_of_threads();
/// Calls `work(i)` for each device in a thread of its own, with the caller's settings (grad mode,
/// autocast, the current streams of the devices) and a share of LibTorch's threads; in the calling
/// thread where the system has no more to give. Throws what the first of them threw, when all have
/// ended.
void in_parallel(const std::vector<at::Device>& devices,
                 const std::function<void(std::size_t)>& work);

/// A ReplicaPass is the forward pass of one replica.
struct ReplicaPass {
  at::Device device;
  std::vector<at::Tensor> outputs;    ///< with their graphs; those that train nothing are left out
  std::vector<at::Tensor> gradients;  ///< of the outputs, on any device
  std::vector<at::Tensor> wanted;  ///< leaves of the graph, whose gradients are asked for; replicas
                                   ///< may have some in common
};

/// Returns for each replica the gradients of what it wants; undefined where there is none. What
/// several replicas want is given to the first of them, the sum over all. One pass for all:
/// autograd has a thread for each GPU, and the calling one is one of them, which must not wait for
/// a thread that asks for a pass of its own.
std::vector<std::vector<at::Tensor>> gradients_in_one_pass(
    const std::vector<ReplicaPass>& replicas);
/// Returns the same, but each gives what it wants its own share. On the CPU, where a pass runs in
/// the thread that asks for it: each replica's is in a thread of its own.
std::vector<std::vector<at::Tensor>> gradients_in_parallel(
    const std::vector<ReplicaPass>& replicas);

}  // namespace hvd::detail
