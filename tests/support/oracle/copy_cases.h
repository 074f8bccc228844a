#pragma once
/// What the copy kernels are tried with, on a GPU (tests/gpu/batched_copy_gpu_test.cc) and thread
/// by thread on the host (tests/ops/gpu/kernels/batched_copy_test.cc): every supported pair of
/// types x plain, scaled, divided x counts around the kernels' boundaries x misalignments of source
/// and destination; many small tensors, more than one launch holds; in place. What must come out is
/// computed by `copy_on_host`; nothing may be written outside. Plain functions, any thread.

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {

/// Tensors of `counts` elements, each `src_skew` and `dst_skew` elements behind a 256-byte
/// boundary.
struct CopyCase {
  DataType from = DataType::Float32;
  DataType to = DataType::Float32;
  double factor = 1;
  std::int64_t divisor = 1;
  std::vector<std::int64_t> counts;
  std::size_t src_skew = 0;
  std::size_t dst_skew = 0;
  bool in_place = false;

  CopyJob job(std::span<const CopyItem> items) const {
    return {.items = items, .from = from, .to = to, .factor = factor, .divisor = divisor};
  }
  std::string text() const;
};

/// The memory of a case: all sources in one block, all destinations in another (or the same).
struct CopyMemory {
  std::vector<std::byte> src, dst;  ///< `dst` is empty in place
  std::vector<std::size_t> src_at, dst_at;

  std::vector<CopyItem> items(const CopyCase& tried, const std::byte* src_base,
                              std::byte* dst_base) const;
};

/// Any integer; floats of moderate size, sometimes huge, tiny, zero or infinite.
std::vector<std::byte> random_values(DataType dtype, std::size_t bytes, std::minstd_rand& random);

CopyMemory memory_of(const CopyCase& tried);

/// Carries a case out and returns the whole block of destinations.
using CopyRunner =
    std::function<std::vector<std::byte>(const CopyCase& tried, const CopyMemory& memory)>;

/// Empty if `run` did it right.
std::optional<std::string> copy_failure(const CopyCase& tried, const CopyRunner& run);

/// Calls `use` with each case. `thorough`: sizes and misalignments for a GPU; otherwise what a host
/// can do in seconds.
void for_each_copy_case(bool thorough, const std::function<void(const CopyCase&)>& use);

}  // namespace hvd::gpu::test
