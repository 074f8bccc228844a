#pragma once
/// Memory of one rank that the other ranks of its host use too: one of them makes it and tells the
/// others where, they open it there. It is given back when none of them holds it any more, whoever
/// lets go last. Any thread.
// Tested in tests/torch_bindings/parameters/shared_parameters_test.cc,
// tests/torch_bindings/gradients/gradient_memory_test.cc

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hvd/base/visible.h"

namespace hvd {

/// Gives pages of this rank's arena that nothing uses back to the system, where that can be done:
/// what a model had is not needed for the next one. Costs the next tensors there new pages. Does
/// nothing without a world.
HVD_BETWEEN_LIBRARIES void trim_host_memory() noexcept;

/// Memory and the place by which the other ranks of the host find it.
struct HostMemory {
  std::shared_ptr<void> data;  ///< null where ranks share no memory, and where the arena is full
  std::uint64_t place = 0;
};

/// Makes `bytes` of it, aligned to 64, for this rank and `others` more, each of which opens it
/// once. Throws NotInitialized.
HVD_BETWEEN_LIBRARIES HostMemory allocate_for_host(std::size_t bytes, int others);
/// Returns what `maker`, a rank of this host, has made and told the place of. Throws
/// NotInitialized; InvalidArgument for a rank that this one shares no memory with.
HVD_BETWEEN_LIBRARIES std::shared_ptr<void> open_host_memory(int maker, std::uint64_t place);

}  // namespace hvd
