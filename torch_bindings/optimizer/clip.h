#pragma once
/// This is gradient clipping for a DistributedOptimizer. The gradients of all ranks together are
/// clipped, by a norm that is the same on all ranks: torch::nn::utils::clip_grad_norm_ between
/// `backward()` and `step()` would see what is still under way, and is refused by `step()`. After
/// the backward pass of a DistributedDataParallel gradients are there: there LibTorch's own
/// functions do. All of them finish the reductions of a DistributedOptimizer first (`step()` then
/// does not reduce again). Thread: the optimizer's. Errors: InvalidArgument for a wrong bound; what
/// `synchronize()` throws.
// Tested in tests/torch_bindings/what_if/what_if_clipping_test.cc

#include "torch_bindings/optimizer/master_weights.h"
#include "torch_bindings/optimizer/optimizer.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Scales the gradients of all parameters of the optimizer, in place, so that their norm together
/// is at most `max_norm`. Collective. Returns the norm that they had, 0 without gradients.
/// `norm_type`: 2, any other p, or infinity for the largest magnitude. Works on a sharded
/// optimizer, on sparse gradients, and after GradScaler::unscale_(). A norm that is not finite
/// leaves gradients that are not, as torch::nn::utils::clip_grad_norm_ does. With MasterWeights the
/// fp32 gradients are clipped.
double clip_grad_norm_(DistributedOptimizer& optimizer, double max_norm, double norm_type = 2);
/// Does the same for an optimizer without a DistributedOptimizer, whose gradients are there. Local.
double clip_grad_norm_(MasterWeights& optimizer, double max_norm, double norm_type = 2);

/// Returns the norm that the gradients of all ranks together have, 0 without gradients: for a log.
/// All ranks call it, or none. Between `backward()` and `synchronize()` `.grad` may still be this
/// rank's own gradient, or already the mean.
double grad_norm(DistributedOptimizer& optimizer, double norm_type = 2);

/// Brings every element of the gradients of the optimizer's parameters to the nearest one from
/// -clip_value to clip_value, in place, as torch::nn::utils::clip_grad_value_ does. Collective as
/// `synchronize()` is. Works where clip_grad_norm_() does: sharded, on sparse gradients, after
/// GradScaler::unscale_(), with MasterWeights on the fp32 gradients. NaN stays. Throws
/// InvalidArgument for a clip_value that is negative or NaN.
void clip_grad_value_(DistributedOptimizer& optimizer, double clip_value);
/// Does the same for an optimizer without a DistributedOptimizer, whose gradients are there. Local.
void clip_grad_value_(MasterWeights& optimizer, double clip_value);

}  // namespace hvd
#pragma GCC visibility pop
