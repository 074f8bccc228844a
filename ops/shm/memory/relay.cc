#include "ops/shm/memory/relay.h"

#include <algorithm>
#include <cstring>

#include "ops/shm/memory/stream_copy.h"

namespace hvd {

std::uint64_t Relay::taken_by_all() const {
  std::uint64_t least = taken_by(0);
  for (std::size_t reader = 1; reader < readers_; ++reader)
    least = std::min(least, taken_by(reader));
  return least;
}

std::uint64_t Relay::taken() const {
  std::uint64_t sum = 0;
  for (std::size_t reader = 0; reader < readers_; ++reader) sum += taken_by(reader);
  return sum;
}

bool Relay::give(std::span<const std::byte> memory, std::uint64_t& next) {
  const std::uint64_t taken = taken_by_all();
  next = std::max(next, taken);
  if (next >= pieces_of(memory.size()) || next >= taken + kPlaces) return false;
  Place& place = places_[next % kPlaces];
  const auto part = part_of(memory, next);
  std::memcpy(place.bytes.data(), part.data(), part.size());
  place.given.store(++next, std::memory_order_release);
  return true;
}

bool Relay::take(std::size_t reader, std::span<std::byte> to, bool past_caches) {
  const std::uint64_t piece = taken_by(reader);
  if (piece >= pieces_of(to.size())) return false;
  const Place& place = places_[piece % kPlaces];
  if (place.given.load(std::memory_order_acquire) != piece + 1) return false;
  const auto part = part_of(to, piece);
  (past_caches ? stream_copy : plain_copy)(part.data(), place.bytes.data(), part.size());
  skip(reader);
  return true;
}

}  // namespace hvd
