#pragma once
/// Says in which order a virtual GPU does what lies on its streams. A value.

#include <cstdint>
#include <string>

namespace hvd::gpu::test {

struct Schedule {
  enum class Kind : std::uint8_t {
    Delayed,  ///< each operation lets some queries pass, as `HostDevice::delay` says
    Late,     ///< as late as is legal: what a query waits for, and nothing else
    Random,   ///< any of what may run
    Eager,    ///< at once, as far as it can
    Starved,  ///< likewise, but for one stream, which runs when it is waited for
  };
  Kind kind = Kind::Delayed;
  std::uint64_t seed = 0;
};

/// Returns "late:17".
std::string text_of(const Schedule& schedule);
/// Returns the one that a text of this form names. Throws std::invalid_argument.
Schedule schedule_of(const std::string& text);
/// Returns the one that HVD_TEST_GPU_SCHEDULE names, for tests that ask for none; otherwise
/// `Delayed`.
Schedule schedule_of_environment();

}  // namespace hvd::gpu::test
