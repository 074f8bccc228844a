#pragma once
/// The instances of the suite: one backend each, with threads or processes as ranks.

#include <cstdint>

#include "ops/gpu/api/placement.h"
#include "ops/gpu/nccl/memory.h"
#include "tests/contract/runner.h"

namespace hvd::contract {

/// Ranks are threads; host memory through the shared-memory backend, or device memory (a host's,
/// pretended) that travels one of its ways.
Report run_shm_threads(int ranks, const Choice& choice);
struct GpuInstance {
  const char* name;
  Route way;
  gpu::Registration registration = gpu::Registration::None;  ///< of NCCL's fusion buffers
};
Report run_gpu_threads(const GpuInstance& instance, int ranks, const Choice& choice);
/// This process is a rank; hvd::init() finds the others. The report of all ranks on rank 0, empty
/// on the others. `gpu`: this program's memory is a GPU's too (tests/gpu/managed_new.cc), and is
/// submitted as such.
Report run_processes(const Choice& choice, bool gpu, bool& is_first);

/// Both worlds of an instance start with this threshold and with 0.
inline constexpr std::uint64_t kThreshold = std::uint64_t{128} << 20;

}  // namespace hvd::contract
