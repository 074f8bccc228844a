#pragma once
/// held_module() finds the module that a ModuleHolder, such as torch::nn::Linear, or a
/// std::shared_ptr holds, or that is given itself. Any thread.
// Tested in tests/torch_bindings/parameters/share_memory_test.cc

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <string_view>

#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd::detail {

/// Returns the module itself.
inline torch::nn::Module& held_module(torch::nn::Module& module, std::string_view /*what*/) {
  return module;
}
inline const torch::nn::Module& held_module(const torch::nn::Module& module,
                                            std::string_view /*what*/) {
  return module;
}
/// Returns the module that a holder holds. `what`: who asks for it.
template <class Module>
torch::nn::Module& held_module(const torch::nn::ModuleHolder<Module>& module,
                               std::string_view /*what*/) {
  return *module.ptr();
}
/// Returns what the pointer points to. Throws InvalidArgument, on this rank, for a null pointer.
template <std::derived_from<torch::nn::Module> Module>
torch::nn::Module& held_module(const std::shared_ptr<Module>& module, std::string_view what) {
  if (!module) throw InvalidArgument(std::string(what) + ": a null pointer to a module");
  return *module;
}

/// A module, or something that holds one.
template <class Held>
concept HoldsModule = requires(const Held& held) {
  held_module(held, "");
};

}  // namespace hvd::detail
#pragma GCC visibility pop
