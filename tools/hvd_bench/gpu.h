#pragma once
/// This is the GPU that this rank measures on, as far as hvd_bench needs it. In a build without
/// CUDA (gpu_none.cc) there is none. It fails with WrongOptions where there is no GPU, and with
/// std::runtime_error and CUDA's words.

#include <hvd/types.h>

#include <cstddef>
#include <memory>

namespace bench::gpu {

/// This rank's, which hvd takes too: by its local rank.
hvd::Device device();
/// Uninitialised.
std::shared_ptr<void> allocate(std::size_t bytes);
/// Either way between host and GPU, or within one; returns when it is done.
void copy(void* to, const void* from, std::size_t bytes);

}  // namespace bench::gpu
