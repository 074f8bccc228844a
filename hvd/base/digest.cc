#include "hvd/base/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace hvd {

namespace {

constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f,
                        kPrime3 = 0x165667b19e3779f9, kPrime4 = 0x85ebca77c2b2ae63,
                        kPrime5 = 0x27d4eb2f165667c5;

template <class Word>
Word read(const std::byte* from) {
  Word word = 0;
  std::memcpy(&word, from, sizeof word);
  return word;
}

std::uint64_t step(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

std::uint64_t digest_of_memory(const void* memory, std::size_t bytes, std::uint64_t before) {
  const auto* next = static_cast<const std::byte*>(memory);
  const auto* const end = next + bytes;
  std::uint64_t all = before + kPrime5;
  if (bytes >= 32) {
    std::array<std::uint64_t, 4> lanes{before + kPrime1 + kPrime2, before + kPrime2, before,
                                       before - kPrime1};
    for (; end - next >= 32; next += 32)
      for (std::size_t i = 0; i < 4; ++i)
        lanes[i] = step(lanes[i], read<std::uint64_t>(next + 8 * i));
    all = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
          std::rotl(lanes[3], 18);
    for (const auto lane : lanes) all = (all ^ step(0, lane)) * kPrime1 + kPrime4;
  }
  all += bytes;
  for (; end - next >= 8; next += 8)
    all = std::rotl(all ^ step(0, read<std::uint64_t>(next)), 27) * kPrime1 + kPrime4;
  if (end - next >= 4) {
    all = std::rotl(all ^ (read<std::uint32_t>(next) * kPrime1), 23) * kPrime2 + kPrime3;
    next += 4;
  }
  for (; next != end; ++next)
    all = std::rotl(all ^ (std::to_integer<std::uint64_t>(*next) * kPrime5), 11) * kPrime1;
  all = (all ^ all >> 33) * kPrime2;
  all = (all ^ all >> 29) * kPrime3;
  return all ^ all >> 32;
}

}  // namespace hvd
