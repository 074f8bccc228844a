#include "tests/support/programs/random_values.h"

#include "tests/support/oracle/oracle_numbers.h"
#include "tests/support/random.h"

namespace hvd::test {

Data random_values(std::uint64_t seed, int rank, DataType dtype, std::size_t count) {
  Random random(Random::mixed(seed) + static_cast<std::uint64_t>(rank));
  const bool wild = Random::mixed(seed ^ 77) % 3 == 0;  // integers of all sizes, so that sums wrap
  Data data(count * element_bytes(dtype));
  oracle::with_number(dtype, [&]<class N>(N) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t drawn = random.next();
      const auto step = static_cast<std::int64_t>(drawn >> 20U & 0x7ffU) - 1023;
      const auto put = [&](std::size_t at, double value) {
        N::put(data, at, static_cast<typename N::Value>(value));
      };
      if constexpr (N::kKind == oracle::Kind::Truth) {
        data[i] = std::byte{static_cast<unsigned char>(drawn % 3 == 0 ? 0
                                                       : wild         ? drawn >> 8U & 0xffU
                                                                      : 1)};
      } else if constexpr (N::kKind == oracle::Kind::Whole) {
        // the low bytes
        N::put(data, i,
               static_cast<typename N::Value>(wild ? static_cast<std::int64_t>(drawn) : step / 20));
      } else if constexpr (N::kParts == 2) {
        put(2 * i, static_cast<double>(step) / 48.0);
        put(2 * i + 1, static_cast<double>(drawn & 0x3ffU) / -96.0);
      } else {
        put(i, static_cast<double>(step) / (wild ? 3000.0 : 64.0));
      }
    }
  });
  return data;
}

}  // namespace hvd::test
