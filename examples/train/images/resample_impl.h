#pragma once
/// This is the one text of the kernels in resample.h; the file that includes it is compiled for an instruction set and defines what

/// is exported.

#include <cstring>

#include "examples/train/images/resample.h"

namespace examples {
namespace {

constexpr int kBits = 22;  // of a weight's fraction
constexpr std::int32_t kHalf = 1 << (kBits - 1);

using Ints4 = std::int32_t __attribute__((vector_size(16)));
using Bytes4 = std::uint8_t __attribute__((vector_size(4)));
using Ints16 = std::int32_t __attribute__((vector_size(64)));
using Bytes16 = std::uint8_t __attribute__((vector_size(16)));

/// Sums go by reference: vectors that the instruction set lacks would change how functions are called.
template <class Ints, class Bytes>
inline void store_clipped(Ints& sum, std::uint8_t* out) {
  sum >>= kBits;
  sum = sum < 0 ? Ints{} : sum;
  sum = sum > 255 ? Ints{} + 255 : sum;
  const auto bytes = __builtin_convertvector(sum, Bytes);
  std::memcpy(out, &bytes, sizeof(bytes));
}

template <class Ints, class Bytes>
inline void add_weighted(Ints& sum, const std::uint8_t* from, std::int32_t weight) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  sum += __builtin_convertvector(bytes, Ints) * weight;
}

void across(const std::uint8_t* row, int origin, const Weights& weights, std::uint8_t* out) {
  const std::size_t size = weights.firsts.size();
  for (std::size_t x = 0; x < size; ++x, out += 4) {
    const auto span = weights.span(x);
    const std::uint8_t* from = row + 4 * static_cast<std::ptrdiff_t>(span.first - origin);
    Ints4 sum = Ints4{} + kHalf;
    for (int t = 0; t < span.count; ++t, from += 4) add_weighted<Ints4, Bytes4>(sum, from, span.weights[t]);
    store_clipped<Ints4, Bytes4>(sum, out);
  }
}

template <class Ints, class Bytes>
inline void column(const std::uint8_t* from, std::size_t stride, int count, const std::int32_t* weights, std::uint8_t* out) {
  Ints sum = Ints{} + kHalf;
  for (int t = 0; t < count; ++t, from += stride) add_weighted<Ints, Bytes>(sum, from, weights[t]);
  store_clipped<Ints, Bytes>(sum, out);
}

void down(const std::uint8_t* first_row, std::size_t stride, int count, const std::int32_t* weights, std::size_t bytes, std::uint8_t* out) {
  std::size_t i = 0;
  for (; i + 16 <= bytes; i += 16) column<Ints16, Bytes16>(first_row + i, stride, count, weights, out + i);
  for (; i < bytes; i += 4) column<Ints4, Bytes4>(first_row + i, stride, count, weights, out + i);
}

}  // namespace
}  // namespace examples
