#pragma once
/// What the kernels' code uses of CUDA, for tests that run it on the host, thread by thread: to be
/// included before the kernel's header. Counts wide accesses, and those that would fault on a
/// device. One thread.

#include <array>
#include <cstdint>

#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {

inline std::uint64_t wide_loads = 0;  ///< of whole groups, as one access
inline std::uint64_t wide_stores = 0;
inline std::uint64_t misaligned = 0;  ///< would be a fault on the device

}  // namespace hvd::gpu::test

struct alignas(8) uint2 {
  std::array<std::uint32_t, 2> words;
};
struct alignas(16) uint4 {
  std::array<std::uint32_t, 4> words;
};
// NOLINT: CUDA's name
using __half = hvd::gpu::test::Half;
using __nv_bfloat16 = hvd::gpu::test::Bfloat;                                             // NOLINT
inline float __half2float(__half value) { return static_cast<float>(value); }             // NOLINT
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }  // NOLINT
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }         // NOLINT
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }    // NOLINT

template <class Word>
Word __ldcs(const Word* from) {  // NOLINT
  ++hvd::gpu::test::wide_loads;
  if (reinterpret_cast<std::uintptr_t>(from) % alignof(Word) != 0) ++hvd::gpu::test::misaligned;
  return *from;
}
template <class Word>
void __stwb(Word* to, Word value) {  // NOLINT
  ++hvd::gpu::test::wide_stores;
  if (reinterpret_cast<std::uintptr_t>(to) % alignof(Word) != 0) ++hvd::gpu::test::misaligned;
  *to = value;
}

#define HVD_DEVICE inline
#define HVD_UNROLL
#define HVD_ROLL
