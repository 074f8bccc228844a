#pragma once
/// hvd's kernels by the stubs that nvcc has made for them. Under a Lock.

#include <cstdint>

#include "tests/gpu/double/world.h"
#include "tests/support/random.h"

namespace hvd::gpu::test::cuda {

/// `name`: mangled.
void name_kernel(const void* stub, const char* name);
/// Reads the arguments.
Work prepare_kernel(const void* stub, void** arguments, unsigned blocks);
std::uint64_t random_number();

}  // namespace hvd::gpu::test::cuda
