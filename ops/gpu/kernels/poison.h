#pragma once
/// This kernel makes results unusable that an abort may have left half done. `launch_poison` (poison.cu) enqueues on a stream and returns.
/// Any thread may call it; it keeps no state and fails by its return value. It needs no CUDA header, so that the backend and its tests
/// build anywhere.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/types.h"
#include "ops/gpu/cuda_types.h"

#ifdef __CUDACC__
#define HVD_ON_BOTH __host__ __device__
#else
#define HVD_ON_BOTH
#endif

namespace hvd::gpu {

/// `bytes` from `begin`; no alignment is required.
struct PoisonItem {
  void* begin = nullptr;
  std::size_t bytes = 0;
};

/// If `*mark` is not zero when the stream gets there, every byte of the items becomes that of `poison_byte`; otherwise nothing happens.
struct PoisonJob {
  std::span<const PoisonItem> items;
  const std::uint32_t* mark = nullptr;  ///< host memory that the device reads
  DataType dtype = DataType::Float32;
};

/// What every byte of a poisoned value is. Floats and complex numbers: all bits, which is NaN in every format. Integers: 0x80, which is a
/// large negative number where there is a sign, and 128 in UInt8. Bool: 1, as no other byte but 0 is a truth value.
constexpr std::uint8_t poison_byte(DataType dtype) {
  if (dtype == DataType::Bool) return 1;
  return is_integer(dtype) ? 0x80 : 0xff;
}

/// Enqueues the job on `stream` of the current device; the list is read before it returns. Launches one kernel for each 128 items that have
/// bytes.
CudaCode launch_poison(const PoisonJob& job, CudaStream* stream);

// ---- the code of the kernel

namespace poison {

inline constexpr int kThreads = 256;
inline constexpr int kItems = 128;
inline constexpr int kMostBlocks = 64;  // each reads the mark, over the bus; rarely do they do more

struct Table {
  std::uint8_t* begin[kItems];
  std::size_t bytes[kItems];
  int items;
  std::uint8_t value;
};

/// What thread `thread` of so many does of the whole table.
HVD_ON_BOTH inline void fill(const Table& table, std::size_t thread, std::size_t threads) {
  for (int item = 0; item < table.items; ++item)
    for (std::size_t i = thread; i < table.bytes[item]; i += threads) table.begin[item][i] = table.value;
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
        launch(table, static_cast<int>(std::clamp<std::size_t>(bytes / kBytesPerBlock, 1, static_cast<std::size_t>(kMostBlocks))));
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

}  // namespace poison

}  // namespace hvd::gpu
