#pragma once
/// Hooks that LibTorch calls when backward has added to a parameter's `.grad`, or is about to.
/// LibTorch has room for one on each parameter; these are linked, so that a user's own is called
/// too (first: what it does to the gradient counts), and is there again when ours is taken off. Of
/// the hooks of several owners only the one put on last is called. Thread: one at a time, not while
/// a backward pass runs; the hooks themselves run in autograd's threads.
// Tested in tests/torch_bindings/what_if/what_if_gradients_test.cc

#include <ATen/core/Tensor.h>

#include <functional>

namespace hvd::detail {

/// Returns whether the parameter may get a gradient that is to be reduced. One of integers or bool
/// never does, and one of a type that does not travel is left out while it is frozen.
bool gets_gradients(const at::Tensor& parameter);

/// Puts a hook on the parameter, on top of what is there.
void add_gradient_hook(const at::Tensor& parameter, const void* owner, std::function<void()> call);
/// Takes the owner's hook off, wherever it is; what was below it moves up. Does nothing if it is
/// not there.
void remove_gradient_hook(const at::Tensor& parameter, const void* owner);
/// Returns whether the owner's hook is still there: a user may have set another in its place.
bool has_gradient_hook(const at::Tensor& parameter, const void* owner);

/// Has `call` called before backward adds to `.grad`, and not where torch::autograd::grad gives the
/// gradient to who asks for it; as long as the owner's hook above is the one that will be called.
/// The parameter must require a gradient. Returns the number for `remove_hook`.
unsigned add_hook_before(const at::Tensor& parameter, const void* owner,
                         std::function<void()> call);

}  // namespace hvd::detail
