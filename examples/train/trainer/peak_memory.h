#pragma once
/// These functions say how much memory this process had at most. They need no LibTorch and never fail.

#include <cstdint>

namespace examples {

/// Begins a new measurement, where the system allows it; elsewhere peak_bytes() counts from the process's start.
void reset_peak_bytes();
/// The most bytes of memory that the process had in use (its resident set) since then.
std::int64_t peak_bytes();

}  // namespace examples
