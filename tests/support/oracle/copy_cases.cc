#include "tests/support/oracle/copy_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

namespace hvd::gpu::test {

std::string CopyCase::text() const {
  return std::string(name_of(from)) + " to " + std::string(name_of(to)) + ", factor " +
         std::to_string(factor) + ", divisor " + std::to_string(divisor) + ", " +
         std::to_string(counts.size()) + " tensors, skew " + std::to_string(src_skew) + " and " +
         std::to_string(dst_skew) + (in_place ? ", in place" : "");
}

std::vector<CopyItem> CopyMemory::items(const CopyCase& tried, const std::byte* src_base,
                                        std::byte* dst_base) const {
  std::vector<CopyItem> made;
  for (std::size_t i = 0; i < src_at.size(); ++i)
    made.push_back({src_base + src_at[i], dst_base + dst_at[i], tried.counts[i]});
  return made;
}

std::vector<std::byte> random_values(DataType dtype, std::size_t bytes, std::minstd_rand& random) {
  std::vector<std::byte> made(bytes);
  if (is_integer(dtype) || dtype == DataType::Bool || is_complex(dtype)) {
    for (auto& byte : made) byte = static_cast<std::byte>(random() >> 8);
    return made;
  }
  const double special[] = {0.0, -0.0, 1e30, -1e-30, 6e-8, 65519.0, 65520.0, HUGE_VAL, -HUGE_VAL};
  with_host_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Native;
    for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
      const double ordinary = (static_cast<double>(random() % 2000001) - 1000000) / 4096;
      const auto value =
          static_cast<T>(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(
              random() % 16 == 0 ? special[random() % std::size(special)] : ordinary));
      std::memcpy(made.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return made;
}

CopyMemory memory_of(const CopyCase& tried) {
  CopyMemory memory;
  const auto place = [&](std::vector<std::size_t>& at, std::size_t skew, std::size_t element) {
    std::size_t total = 0;
    for (const std::int64_t count : tried.counts) {
      at.push_back(total + skew * element);
      total = (at.back() + static_cast<std::size_t>(count) * element + 511) / 256 * 256;
    }
    return total;
  };
  const std::size_t src_bytes = place(memory.src_at, tried.src_skew, element_bytes(tried.from));
  const std::size_t dst_bytes = place(memory.dst_at, tried.dst_skew, element_bytes(tried.to));
  std::minstd_rand random(
      static_cast<unsigned>(tried.counts.size() * 31 + tried.src_skew * 7 + tried.dst_skew));
  memory.src = random_values(tried.from, src_bytes, random);
  if (!tried.in_place) memory.dst.assign(dst_bytes, std::byte{0xa5});
  return memory;
}

std::optional<std::string> copy_failure(const CopyCase& tried, const CopyRunner& run) {
  const CopyMemory memory = memory_of(tried);
  std::vector<std::byte> wanted = tried.in_place ? memory.src : memory.dst;
  const auto items =
      memory.items(tried, tried.in_place ? wanted.data() : memory.src.data(), wanted.data());
  if (copy_on_host(tried.job(items)) != CudaCode::Success)
    return tried.text() + ": refused by the oracle";
  const auto got = run(tried, memory);
  if (got == wanted) return std::nullopt;
  const auto at = std::mismatch(got.begin(), got.end(), wanted.begin()).first - got.begin();
  return tried.text() + ": first difference at byte " + std::to_string(at) + " of " +
         std::to_string(got.size());
}

void for_each_copy_case(bool thorough, const std::function<void(const CopyCase&)>& use) {
  std::vector<std::int64_t> boundaries{1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 255, 4095, 4097, 8193};
  if (thorough) boundaries.insert(boundaries.end(), {4096, 8191, 32769, 65537});
  const std::vector<std::size_t> skews =
      thorough ? std::vector<std::size_t>{0, 1, 2, 3, 4} : std::vector<std::size_t>{0, 1, 3};
  std::vector<std::int64_t> many(161);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int64_t>(i * 37 % 300);
  const std::vector<std::int64_t> more_than_one_launch(kItemsPerLaunch * 2 + 5, 3);
  for (int f = 0; f < kDataTypes; ++f) {
    for (int t = 0; t < kDataTypes; ++t) {
      for (const auto& [factor, divisor] :
           std::vector<std::pair<double, std::int64_t>>{{1, 1}, {0.3, 1}, {1, 3}, {-2.5, 7}}) {
        CopyCase tried{static_cast<DataType>(f),
                       static_cast<DataType>(t),
                       factor,
                       divisor,
                       boundaries,
                       0,
                       0,
                       false};
        if (!copy_supported(tried.job({}))) continue;
        for (tried.src_skew = 0; const std::size_t src_skew : skews) {
          for (const std::size_t dst_skew : skews) {
            tried.src_skew = src_skew;
            tried.dst_skew = dst_skew;
            use(tried);
          }
        }
        tried.src_skew = tried.dst_skew = 1;
        tried.in_place = f == t;
        use(tried);
        tried.in_place = false;
        tried.counts = many;
        use(tried);
        tried.counts = more_than_one_launch;
        use(tried);
        tried.counts = {40000};
        tried.src_skew = tried.dst_skew = 13;
        use(tried);
      }
    }
  }
}

}  // namespace hvd::gpu::test
