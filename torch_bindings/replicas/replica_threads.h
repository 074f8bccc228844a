#pragma once
/// The threads in which replicas of a module run at the same time (torch_bindings/replicas/data_parallel.h): one for each, with the
/// caller's settings. They are joined before the call returns; several threads may call at once.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace hvd::detail {

/// For a thread that works with LibTorch for the first time: its number of threads is then not that of the workers of another one's pass.
void look_at_number_of_threads();
/// Calls `work(i)` for each device in a thread of its own, with the caller's settings (grad mode, autocast, the current streams of the
/// devices) and a share of LibTorch's threads. Throws what the first of them threw, when all have ended.
void in_parallel(const std::vector<at::Device>& devices, const std::function<void(std::size_t)>& work);

}  // namespace hvd::detail
