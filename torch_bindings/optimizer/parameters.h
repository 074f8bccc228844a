#pragma once
/// This file gives all ranks the same start: parameters and optimizer state; any object by
/// objects.h. All functions are collective over the process set. They refuse tensors whose names,
/// shapes or types differ between ranks, and optimizers whose groups do (Mismatch, on all ranks,
/// naming what each has); a name given twice, a bad root (InvalidArgument, at the call, on that
/// rank); an optimizer whose state cannot travel (InvalidArgument, on all ranks, before any has
/// changed).

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/platform/held_module.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Tensors with their names, as `named_parameters().pairs()` of a module gives them.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Makes parameters and buffers those of the root's module, on every rank, in place. They go by
/// their names, as those of a list do.
void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set = {});
/// Makes the tensors the root's, in place. They go by their names: ranks may list them in another
/// order. A tensor that is there under several names (tied weights) is sent once, and must have the
/// same names on all ranks. Undefined tensors are passed over and must be so on all ranks. Throws
/// Mismatch on all ranks, before anything is changed, if names, shapes, types or kinds of device
/// differ, also where a rank's list is empty; InvalidArgument, on that rank, for a name that is
/// there twice. Beside one broadcast it costs an allgather of 16 bytes.
void broadcast_parameters(const NamedTensors& tensors, int root_rank,
                          const ProcessSet& process_set = {});
/// Does the same with what `named_parameters()` of a module gives. A template, so that braces mean
/// the list of pairs.
template <class Name>
void broadcast_parameters(const torch::OrderedDict<Name, at::Tensor>& tensors, int root_rank,
                          const ProcessSet& process_set = {}) {
  broadcast_parameters(tensors.pairs(), root_rank, process_set);
}
/// Does the same for what a ModuleHolder or a std::shared_ptr holds. Throws InvalidArgument, on
/// that rank, for a null pointer.
template <detail::HoldsModule Held>
void broadcast_parameters(const Held& module, int root_rank, const ProcessSet& process_set = {}) {
  const torch::nn::Module& held = detail::held_module(module, "broadcast_parameters");
  broadcast_parameters(held, root_rank, process_set);
}

/// Makes state (momenta, step counters...) and param-group options (learning rate, betas...) those
/// of the root's optimizer, bit for bit, on every rank. The parameters are not touched, and
/// `step()` is not called. Given the optimizer in a DistributedOptimizer or a MasterWeights, it
/// sends the wrapper's. States of a DistributedOptimizer that is not sharded go by the parameters'
/// names, others by their places. An optimizer of the user's own travels by its `save` and `load`;
/// what these do not bring, also if it overrides neither, by the `serialize` of its options and
/// states, and the learning rate by get_lr and set_lr (options that override no more than these: a
/// warning says that the rest of them is not sent). Throws Mismatch on all ranks if groups or
/// parameters differ, or if only some shard; InvalidArgument on all ranks, with the state as it
/// was, where LibTorch gives no way: neither of these is overridden, or a rank whose optimizer has
/// no state has none to copy.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set = {});

}  // namespace hvd
#pragma GCC visibility pop
