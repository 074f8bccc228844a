#pragma once
/// Has a front end give back the memory of a device that it caches, where this library finds none left for itself. Any thread.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc

#include <functional>

#pragma GCC visibility push(default)
namespace hvd::gpu {

/// Sets what gives such memory back: it is called by any thread, under locks of the caller's, and must not use this library. An empty one:
/// nothing does.
void set_memory_relief(std::function<void()> relief);
/// Calls it. Returns whether it has been called and has not thrown: an allocation that has failed is then worth another attempt.
bool relieve_memory() noexcept;

}  // namespace hvd::gpu
#pragma GCC visibility pop
