#pragma once
/// This is the code of the kernel that makes results unusable, and of its launches, but for the
/// launch itself: batched_copy.cu compiles it for the device, and the table on host memory
/// (tests/support) for the host.
// Tested in tests/ops/gpu/kernels/poison_test.cc

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/gpu/kernels/kernels.h"

#ifdef __CUDACC__
#define HVD_ON_BOTH __host__ __device__
#else
#define HVD_ON_BOTH
#endif

namespace hvd::gpu::poison {

inline constexpr int kThreads = 256;
inline constexpr int kItems = 128;
inline constexpr int kMostBlocks = 64;  // each reads the mark, over the bus; rarely do they do more

struct Table {
  std::uint8_t* begin[kItems];
  std::size_t bytes[kItems];
  int items;
  std::uint8_t value;
};

/// Does what thread `thread` of so many does of the whole table.
HVD_ON_BOTH inline void fill(const Table& table, std::size_t thread, std::size_t threads) {
  for (int item = 0; item < table.items; ++item)
    for (std::size_t i = thread; i < table.bytes[item]; i += threads)
      table.begin[item][i] = table.value;
}

/// Calls `launch(table, blocks)`, which returns a CudaCode, once per kernel launch.
template <class Launch>
CudaCode in_launches(const PoisonJob& job, const Launch& launch) {
  Table table;
  table.items = 0;
  table.value = poison_byte(job.dtype);
  std::size_t bytes = 0;
  const auto flush = [&] {
    constexpr std::size_t kBytesPerBlock = 64 * 1024;
    if (table.items == 0) return CudaCode::Success;
    const CudaCode code =
        launch(table, static_cast<int>(std::clamp<std::size_t>(
                          bytes / kBytesPerBlock, 1, static_cast<std::size_t>(kMostBlocks))));
    table.items = 0;
    bytes = 0;
    return code;
  };
  for (const PoisonItem& item : job.items) {
    if (item.bytes == 0) continue;
    table.begin[table.items] = static_cast<std::uint8_t*>(item.begin);
    table.bytes[table.items++] = item.bytes;
    bytes += item.bytes;
    if (table.items < kItems) continue;
    if (const CudaCode code = flush(); code != CudaCode::Success) return code;
  }
  return flush();
}

}  // namespace hvd::gpu::poison
