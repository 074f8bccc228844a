#pragma once
/// Moves a module into memory that the ranks of its host share: collectives on its parameters and
/// buffers need no copies then. Every rank keeps values of its own;
/// DistributedOptimizerOptions::share_parameters gives a host one copy. Thread: the caller's, while
/// nobody else uses the module. The tensors own the memory, also after `hvd::shutdown()`.

#include <torch/nn/module.h>

#include <cstddef>
#include <vector>

#include "torch_bindings/platform/held_module.h"

#pragma GCC visibility push(default)
namespace hvd {

namespace detail {
/// Moves these tensors likewise, each once, and returns how many have moved.
std::size_t move_to_shared_memory(const std::vector<at::Tensor>& tensors);
}  // namespace detail

/// Moves the module's parameters and buffers, with their values, and returns how many have moved.
/// They stay the same tensors: optimizers, hooks and gradients go on. Left where they are: tensors
/// on a GPU, without elements, with gaps or elements that share memory, and whose memory another
/// tensor refers to (a view, a saved variable of a graph that lives); all, where ranks share no
/// memory or the arena is full (HVD_ARENA_BYTES). Local. Throws NotInitialized.
std::size_t share_memory(torch::nn::Module& module);
/// Does the same for what a ModuleHolder, such as torch::nn::Linear, or a std::shared_ptr holds.
/// Throws InvalidArgument for a null pointer.
template <detail::HoldsModule Held>
std::size_t share_memory(Held&& module) {
  torch::nn::Module& held = detail::held_module(module, "share_memory");
  return share_memory(held);
}

}  // namespace hvd
#pragma GCC visibility pop
