#pragma once
/// This header tells how often the ranks of a set have all joined. Any thread.
// Tested in tests/torch_bindings/what_if/what_if_left_over_test.cc

#include <cstdint>

#include "hvd/base/visible.h"
#include "hvd/options.h"

namespace hvd {

/// Sets `noted` to how many joins of the set, in the current world, have ended in this process.
/// Returns whether it was another number. What the ranks have submitted before one of them is over
/// or on its way, and nobody waits for more of it.
HVD_BETWEEN_LIBRARIES bool note_joins(const ProcessSet& process_set, std::uint64_t& noted);

}  // namespace hvd
