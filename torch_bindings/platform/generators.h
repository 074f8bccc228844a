#pragma once
/// The states of random numbers' generators, under the mutex that a draw holds: another thread,
/// such as a loader's, may be drawing. Any thread; throw what the generator does.
// Tested in tests/torch_bindings/checkpoint/checkpoint_run_test.cc,
// tests/torch_bindings/modules/activation_checkpoint_test.cc

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace hvd::detail {

inline at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

inline void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace hvd::detail
