#pragma once
/// Digests of memory and of texts, to find out whether ranks have the same. The method is XXH64
/// (Collet, "xxHash fast digest algorithm"): four lanes of 64 bits, about 10 GB/s. Each step of a
/// lane can be undone, so two texts of one length that differ in 8 adjacent, aligned bytes alone
/// never have the same digest; that others do has a chance of 2^-64. It is no protection against
/// anyone. Functions only; any thread.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "hvd/base/visible.h"

namespace hvd {

/// Returns the digest of `bytes` bytes; `before`, of what precedes them, chains digests.
HVD_BETWEEN_LIBRARIES std::uint64_t digest_of_memory(const void* memory, std::size_t bytes,
                                                     std::uint64_t before = 0);
inline std::uint64_t digest_of(std::string_view text, std::uint64_t before = 0) {
  return digest_of_memory(text.data(), text.size(), before);
}
inline std::uint64_t digest_of(std::uint64_t value, std::uint64_t before) {
  return digest_of_memory(&value, sizeof value, before);
}

}  // namespace hvd
