#include "ops/shm/relay.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace hvd {

namespace {

constexpr auto kPatience = std::chrono::microseconds(100);

}  // namespace

bool Relay::give(std::span<const std::byte> memory) {
  using Clock = std::chrono::steady_clock;
  const std::uint64_t pieces = pieces_of(memory.size());
  auto until = Clock::now() + kPatience;
  std::uint64_t next = 0, seen = 0;
  while (true) {
    const std::uint64_t taken = taken_.load(std::memory_order_acquire);
    if (taken > 0) next = std::max(next, taken + 1);  // the reader is at piece `taken`
    if (next >= pieces) return taken > 0;
    if (next < taken + kPlaces) {
      Place& place = places_[next % kPlaces];
      const auto part = part_of(memory, next);
      std::memcpy(place.bytes.data(), part.data(), part.size());
      place.given.store(++next, std::memory_order_release);
      until = Clock::now() + kPatience;
    } else if (taken != seen) {
      seen = taken;
      until = Clock::now() + kPatience;
    } else if (Clock::now() >= until) {
      return taken > 0;
    }
  }
}

bool Relay::take_given(std::uint64_t piece, std::span<std::byte> to) const {
  const Place& place = places_[piece % kPlaces];
  if (place.given.load(std::memory_order_acquire) != piece + 1) return false;
  std::memcpy(to.data(), place.bytes.data(), to.size());
  return true;
}

}  // namespace hvd
