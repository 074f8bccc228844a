#pragma once
/// The ranges of the board's slots that are free. A unit takes as many as it has tensors, one after the other. A value without a lock, the
/// same on all ranks that have read the same records.
// Tested in tests/hvd/negotiation/negotiator_test.cc, tests/hvd/engine/controller_test.cc

#include <cstdint>
#include <map>
#include <optional>

namespace hvd {

class SlotRanges {
 public:
  /// All of `count` slots are free.
  explicit SlotRanges(std::uint32_t count);

  /// Returns the first of so many free slots that follow one another; none if there are not so many.
  [[nodiscard]] std::optional<std::uint32_t> find(std::uint32_t count) const;
  /// Takes so many from `first` on, which must be where a free range begins. Throws WireError if it is not so.
  void take(std::uint32_t first, std::uint32_t count);
  /// Gives back what was taken.
  void give_back(std::uint32_t first, std::uint32_t count);

 private:
  std::map<std::uint32_t, std::uint32_t> free_;  // first slot -> length; no two touch
};

}  // namespace hvd
