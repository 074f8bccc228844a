#include "hvd/negotiation/values/slot_ranges.h"

#include <iterator>

#include "hvd/base/wire.h"

namespace hvd {

SlotRanges::SlotRanges(std::uint32_t count) { free_[0] = count; }

std::optional<std::uint32_t> SlotRanges::find(std::uint32_t count) const {
  for (const auto& [first, length] : free_)
    if (length >= count) return first;
  return std::nullopt;
}

void SlotRanges::take(std::uint32_t first, std::uint32_t count) {
  const auto range = free_.find(first);
  if (range == free_.end() || range->second < count) throw WireError("introduction of a slot that is not free");
  const auto rest = range->second - count;
  free_.erase(range);
  if (rest > 0) free_[first + count] = rest;
}

void SlotRanges::give_back(std::uint32_t first, std::uint32_t count) {
  const auto range = free_.emplace(first, count).first;
  if (const auto next = std::next(range); next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second != range->first) return;
  previous->second += range->second;
  free_.erase(range);
}

}  // namespace hvd
