#pragma once
/// These random numbers are a function of what they are for (seed, epoch, image...), not of what
/// was drawn before, and the same on every

/// platform. They are values; there is no shared state.

#include <cstdint>
#include <initializer_list>

namespace examples {

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  /// A stream of its own for every list of numbers.
  explicit Random(std::initializer_list<std::uint64_t> purpose) {
    for (const auto word : purpose) state_ = next() ^ word;
  }

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  /// 0 … limit - 1
  int below(int limit) { return static_cast<int>(next() % static_cast<std::uint64_t>(limit)); }
  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// Mean 0, deviation 1, bell-shaped: the sum of four uniform numbers of 16 bits (Irwin and Hall),
  /// cheap and exact.
  double bell() {
    std::uint64_t bits = next();
    int sum = 0;
    for (int i = 0; i < 4; ++i, bits >>= 16) sum += static_cast<int>(bits & 0xFFFF);
    return (sum * 0x1p-16 - 2) * 1.7320508075688772;
  }

 private:
  std::uint64_t state_ = 0;
};

}  // namespace examples
