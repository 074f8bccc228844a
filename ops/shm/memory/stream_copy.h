#pragma once
/// Copies memory without leaving the copy in the caches: for what is so large that its beginning
/// would be gone from them before anybody reads it. The cache lines of the destination are then not
/// read before they are written. Any thread; nothing fails.
// Tested in tests/ops/shm/relay_test.cc

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hvd {

inline void plain_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

/// Copies `bytes` from `from` to `to`, which do not overlap; what has been written is seen by
/// whoever acquires what this thread releases next.
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kVector = sizeof(__m128i), kLine = 4 * kVector;
  const std::size_t before = (kVector - reinterpret_cast<std::uintptr_t>(to) % kVector) % kVector;
  if (bytes >= kLine + before) {
    std::memcpy(to, from, before);
    to += before, from += before, bytes -= before;
    for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine)
      for (std::size_t at = 0; at < kLine; at += kVector) {
        void* const place = to + at;
        const void* const source = from + at;
        _mm_stream_si128(static_cast<__m128i*>(place),
                         _mm_loadu_si128(static_cast<const __m128i*>(source)));
      }
    _mm_sfence();  // such stores are not ordered by a release
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace hvd
