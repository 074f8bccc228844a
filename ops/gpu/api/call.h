#pragma once
/// These functions make a BackendError of a call that was refused: its text has the call's name, the rank, the device, the tensors and the
/// library's words. They are for the thread that has the turn, and own nothing.
// Tested in tests/ops/gpu/nccl/nccl_failure_test.cc

#include <span>
#include <string>
#include <string_view>

#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

/// The context of a call: the rank, GPU and tensors on whose behalf it is made.
struct CallContext {
  const GpuApi* table = nullptr;
  int rank = -1;  ///< global
  int device = 0;
  std::span<const std::string_view> tensors;  ///< their names
};

/// Throws BackendError: "CALL failed on rank R (cuda:D) for 'a', 'b', 'c' and 5 more: WORDS".
[[noreturn]] void fail(const CallContext& site, std::string_view call, std::string_view words);

/// Returns if `code` is Success, fails otherwise.
void check(const CallContext& site, CudaCode code, std::string_view call);
void check(const CallContext& site, NcclCode code, std::string_view call, NcclComm* comm = nullptr);

/// Likewise, for what lets processes share a GPU: says how to do without.
void check_sharing(const CallContext& site, CudaCode code, std::string_view call);

/// "64.0 MiB"
std::string to_mib(std::size_t bytes);

}  // namespace hvd::gpu
