#pragma once
/// This header tells how much of a GPU's memory a call has taken, and, where none is left for this
/// library, gets back what a front end keeps for later.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "ops/gpu/api/call.h"

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
