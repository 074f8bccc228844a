#pragma once
/// Calls of CUDA's and NCCL's. What is refused becomes a BackendError: its text has the call's
/// name, the rank, the device, the tensors and the library's words. What may hang is made within a
/// limit. How much of a GPU's memory a call has taken is told, and, where none is left for this
/// library, what a front end keeps for later is got back. For the thread that has the turn, but for
/// within() and the last; owns nothing.
// Tested in tests/ops/gpu/nccl/nccl_failure_test.cc, tests/ops/gpu/ipc/shared_gpu_limits_test.cc,
// tests/ops/gpu/nccl/nccl_memory_test.cc

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "ops/gpu/api/gpu_api.h"

#pragma GCC visibility push(default)
namespace hvd::gpu {

/// Sets what gives such memory back: it is called by any thread, under locks of the caller's, and
/// must not use this library. An empty one: nothing does.
void set_memory_relief(std::function<void()> relief);
/// Calls it. Returns whether it has been called and has not thrown: an allocation that has failed
/// is then worth another attempt.
bool relieve_memory() noexcept;

}  // namespace hvd::gpu
#pragma GCC visibility pop

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

/// A Remark is told something that a user may want to read. It may be empty: nobody is told then.
using Remark = std::function<void(const std::string& text)>;

/// MemoryUse measures what a call takes of a GPU's memory: NCCL and CUDA round up what they are
/// asked for, by how much depends on the machine, and neither says it. It measures where somebody
/// wants to know. For the thread that has the turn, under a DeviceGuard. Never fails: what cannot
/// be measured is not said.
class MemoryUse {
 public:
  /// Asks how much memory is free (cudaMemGetInfo), for the difference, unless `remark` is empty.
  /// Keeps both arguments.
  MemoryUse(const CallContext& site, const Remark& remark);
  /// Returns "WHAT 36.0 MiB of cuda:0's memory (32.0 MiB were asked for)"; an empty text where it
  /// is not known, or there is more free now, because somebody else has freed memory.
  [[nodiscard]] std::string describe(std::string_view what, std::size_t asked_bytes) const;
  /// Remarks that.
  void say(std::string_view what, std::size_t asked_bytes) const;

 private:
  [[nodiscard]] std::optional<std::size_t> free_now() const;

  const CallContext& site_;
  const Remark& remark_;
  const std::optional<std::size_t> before_;
};

}  // namespace hvd::gpu
