#pragma once
/// ExposedMemory is the port through which a rank lets another one of its domain get what it sends
/// where it lies: one copy, by the receiver. A backend may implement it. Any thread. The memory is
/// the sender's, who keeps it until the receiver has it. It fails with BackendError.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <cstddef>
#include <cstdint>
#include <optional>

#pragma GCC visibility push(default)
namespace hvd {

/// An ExposedMemory is the sender's memory as its receivers see it.
class ExposedMemory {
 public:
  virtual ~ExposedMemory() = default;
  /// Lets the other ranks of the domain read these bytes, more than none, until `withdraw`. Returns
  /// where they are; none where they cannot be read, or copies through rings are faster. `fed`:
  /// rings are faster than to read another process.
  virtual std::optional<std::uint64_t> expose(const void* memory, std::size_t bytes, bool fed) = 0;
  /// Ends that.
  virtual void withdraw(std::uint64_t location) noexcept = 0;
  /// Copies `bytes` of what the rank with this index in the domain has exposed, which begin after
  /// `skipped`, to `to`. Returns false if the rank's process has ended.
  virtual bool get(int index, std::uint64_t location, std::size_t skipped, void* to,
                   std::size_t bytes) = 0;
};

}  // namespace hvd
#pragma GCC visibility pop
