#pragma once
/// Hooks that LibTorch calls when backward has added to a parameter's `.grad`, or is about to.
/// LibTorch has room for one on each parameter; these are linked, so that a user's own is called
/// too (first: what it does to the gradient counts), and is there again when ours is taken off. Of
/// the hooks of several owners only the one put on last is called. Thread: one at a time, not while
/// a backward pass runs; the hooks themselves run in autograd's threads.
// Tested in tests/torch_bindings/what_if/what_if_gradients_test.cc

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace hvd::detail {

/// Returns whether the parameter may get a gradient that is to be reduced. One of integers or bool
/// never does, and one of a type that does not travel is left out while it is frozen.
bool gets_gradients(const at::Tensor& parameter);

/// GradientCalls are what an owner of hooks has called.
struct GradientCalls {
  std::function<void()> after;   ///< when backward has added to `.grad`
  std::function<void()> before;  ///< before it does, and not where torch::autograd::grad gives the
                                 ///< gradient to who asks for it
};

/// Puts on what is not there: `after` on top of what there is, also where a user has set a hook in
/// its place; where it is wanted `before`, whose number is kept in `number`, once the parameter
/// requires a gradient, as LibTorch takes it only then. Has them made only if one is to be put on.
void put_gradient_hooks(const at::Tensor& parameter, const void* owner,
                        std::optional<unsigned>& number, bool wants_before,
                        const std::function<GradientCalls()>& make);
/// Takes the owner's hooks off, wherever they are; what was below moves up. Does nothing if they
/// are not there.
void remove_gradient_hooks(const at::Tensor& parameter, const void* owner,
                           std::optional<unsigned>& number);
/// Returns whether the owner's hook is still there: a user may have set another in its place.
bool has_gradient_hook(const at::Tensor& parameter, const void* owner);

}  // namespace hvd::detail
