#pragma once
/// Calls of CUDA's and NCCL's. What is refused becomes a BackendError: its text has the call's
/// name, the rank, the device, the tensors and the library's words. What may hang is made within a
/// limit. For the thread that has the turn, but for within(); owns nothing.
// Tested in tests/ops/gpu/nccl/nccl_failure_test.cc, tests/ops/gpu/ipc/shared_gpu_limits_test.cc

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

/// A CallContext says on whose behalf calls are made.
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

/// Does the same for what lets processes share a GPU: its error says how to do without.
void check_sharing(const CallContext& site, CudaCode code, std::string_view call);

/// "64.0 MiB"
std::string to_mib(std::size_t bytes);

/// Makes a call that may hang, and goes on without it after a while. It is for the ends of things
/// (ncclCommAbort, when a network is gone or a kernel of the user's does not end): nobody who waits
/// for a result may hang because they do. Any thread; never throws. Calls `work`, which must not
/// throw, in a thread of its own. Returns true when it has ended, and false after `limit` if it has
/// not: the thread is then left to itself until the process ends, so `work` owns what it uses.
/// Where no thread can be had, calls it in this one.
bool within(std::chrono::milliseconds limit, std::function<void()> work) noexcept;

}  // namespace hvd::gpu
