#pragma once
/// Holds what a DistributedOptimizer may be told (torch_bindings/optimizer/optimizer.h), which
/// checks it.
// Tested in tests/torch_bindings/optimizer/optimizer_test.cc

#include <ATen/core/Tensor.h>

#include <concepts>
#include <initializer_list>
#include <utility>
#include <variant>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// GradientGroups say which gradients travel together: by size, in a number of groups, or in lists
/// of parameters.
struct GradientGroups : std::variant<std::monostate, int, std::vector<std::vector<at::Tensor>>> {
  using Lists = std::vector<std::vector<at::Tensor>>;
  /// Groups by size.
  GradientGroups() = default;
  /// Makes so many groups.
  template <std::integral Number>
  // NOLINT(google-explicit-constructor): `.groups = 3`
  GradientGroups(Number number) : variant(static_cast<int>(number)) {}
  /// @{
  /// Makes these groups; parameters in none go by size.
  // NOLINT(google-explicit-constructor): `.groups = lists`
  GradientGroups(Lists lists) : variant(std::move(lists)) {}
  GradientGroups(std::initializer_list<std::vector<at::Tensor>> lists) : variant(Lists(lists)) {}
  /// @}
};

/// DistributedOptimizerOptions are those of a DistributedOptimizer; equal on all ranks.
struct DistributedOptimizerOptions {
  /// The form in which gradients travel. int8, topk and powersgd: see
  /// torch_bindings/gradients/compressor.h. Those gradients travel when all are there, not while
  /// backward runs.
  Compression compression{};
  /// The operation that combines gradients: Average or Sum (Min, Max and Product are refused:
  /// absent gradients count as zeros). Adasum: the wrapped optimizer steps on this rank's own
  /// gradients, and what that changes in the parameters is combined
  /// (torch_bindings/optimizer/adasum_deltas.h); there is nothing to synchronize then, and each
  /// rank's state is its own.
  ReduceOp op = ReduceOp::Average;
  /// The number of backward passes whose gradients are added up on each rank before one reduction.
  /// The sum is not divided by it.
  int backward_passes_per_step = 1;
  /// Divides gradients before the sum, with Average only; size / it divides them after.
  double gradient_predivide_factor = 1;
  GradientGroups
      groups{};  ///< in which gradients travel together: `.groups = 3`, `.groups = {{a, b}, {c}}`
  ProcessSet process_set{};  ///< the ranks that train together
  /// True: sparse gradients are made dense before they are reduced. False: they travel as indices
  /// and values, and stay sparse.
  bool sparse_as_dense = false;
  /// True: the optimizer's state is shared out, ZeRO stage 1
  /// (torch_bindings/sharding/optimizer_shards.h): each rank updates its share of the parameters,
  /// has the state of that share alone, and gets the rest from the others; the parameters are those
  /// of the plain optimizer, bit for bit. For all optimizers of LibTorch but LBFGS
  /// (InvalidArgument). One of the user's own shares whole parameters, as its `step()` may look at
  /// all of one (LARS), also where it derives from one of LibTorch's; its state can be saved where
  /// it is of LibTorch's types, or overrides serialize and clone, and the optimizer save and load.
  bool shard_optimizer_state = false;
  /// True: gradients are shared out as well, ZeRO stage 2; it implies shard_optimizer_state, and
  /// the parameters are those of the plain optimizer, bit for bit. Gradients travel as
  /// reducescatters: each rank gets of them what its share of the update needs, and keeps that
  /// until `step()`, `zero_grad()` or a step that is left out; the memory of a bucket is free as
  /// soon as it is reduced. `.grad` is undefined then: `DistributedOptimizer::gradient_shares()`
  /// has the shares, and clip_grad_norm_ (whose norm is that of all shares, up to rounding) and
  /// GradScaler work on them. Several backward passes go by backward_passes_per_step: another one
  /// after `synchronize()`, and sparse gradients without sparse_as_dense, are refused in the pass.
  /// Throws InvalidArgument with Adasum, share_parameters, and int8, topk or powersgd compression,
  /// which remembers all gradients on every rank.
  bool shard_gradients = false;
  /// True: there is one copy of the parameters and of the optimizer's state per host
  /// (torch_bindings/parameters/shared_parameters.h): each rank of a host updates its share of both
  /// in place, and nothing is sent afterwards; the parameters are those of the plain optimizer, bit
  /// for bit. It implies what `shard_optimizer_state` says, over the ranks of a host. The
  /// parameters move at the first `step()`, where all ranks must have the same (else Mismatch: call
  /// broadcast_parameters first). Who writes to parameters otherwise than by `step()` (clamps
  /// weights, loads others) does so on one rank of the host, while
  /// `DistributedOptimizer::write_parameters()` lives; what broadcast_parameters, Checkpoint::load,
  /// ExponentialMovingAverage and torch::load write is right as it is. Throws InvalidArgument for
  /// parameters on a GPU, for views of larger tensors, where the ranks of a host share no memory,
  /// and where hosts have different numbers of ranks.
  bool share_parameters = false;
  /// True: `.grad` is a view of the memory that gradients are reduced in: a gradient that is kept
  /// (`auto g = p.grad()`) may be overwritten by the next backward pass, also after zero_grad();
  /// clone it, or set this to false. On the host autograd makes gradients of 4 KiB and more there
  /// unless state is sharded, and others are copied there. With false, `.grad` is a tensor of its
  /// own, as LibTorch makes it, for the price of the gradients' memory once more and of copying
  /// what is reduced.
  bool gradients_are_views = true;
};

}  // namespace hvd
#pragma GCC visibility pop
