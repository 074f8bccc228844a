#pragma once
/// MemoryUse measures what a call takes of a GPU's memory: NCCL and CUDA round up what they are asked for, by how much depends on the
/// machine, and neither says it. It measures where somebody wants to know. For the thread that has the turn, under a DeviceGuard. Never
/// fails: what cannot be measured is not said.
// Tested in tests/ops/gpu/nccl/nccl_memory_test.cc

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "ops/gpu/api/call.h"

namespace hvd::gpu {

/// A call with a text that a user may want to read. May be empty: nobody is told.
using Remark = std::function<void(const std::string& text)>;

class MemoryUse {
 public:
  /// Asks how much memory is free (cudaMemGetInfo), for the difference, unless `remark` is empty. Keeps both arguments.
  MemoryUse(const CallContext& site, const Remark& remark);
  /// Returns "WHAT 36.0 MiB of cuda:0's memory (32.0 MiB were asked for)"; an empty text where it is not known, or there is more free now,
  /// because somebody else has freed memory.
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
