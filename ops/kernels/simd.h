#pragma once
/// This header says how elements lie in memory and how a vector of them is computed in: load,
/// store, round. It uses GCC's vector types, of the register's width, and intrinsics only for what
/// they cannot say (fp16). Everything lives in the including file's own namespace.
// Tested in tests/ops/kernels/reduce_test.cc

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

namespace hvd::kernels::detail {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
// For masked intrinsics: the plain forms start from an "undefined" register, which GCC 12 warns of.
constexpr __mmask16 kAll = 0xffff;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::Type;

using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;  // as many as Floats
constexpr std::size_t kFloats = kVectorBytes / sizeof(float);
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));  // as many as Floats

inline Words bits_of(Floats value) { return __builtin_bit_cast(Words, value); }
inline Floats floats_of(Words bits) { return __builtin_bit_cast(Floats, bits); }

inline Words widened(Halves halves) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Words,
                            _mm512_maskz_cvtepu16_epi32(kAll, __builtin_bit_cast(__m256i, halves)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}
/// Returns the lower 16 bits of each word; the upper ones are zero.
inline Halves narrowed(Words words) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Halves,
                            _mm512_maskz_cvtepi32_epi16(kAll, __builtin_bit_cast(__m512i, words)));
#elif defined(__AVX2__)
  const auto all = __builtin_bit_cast(__m256i, words);
  return __builtin_bit_cast(
      Halves, _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

inline Floats from_bfloats(Halves bfloats) { return floats_of(widened(bfloats) << 16); }

inline Halves to_bfloats(Floats value) {
  const Words bits = bits_of(value);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return narrowed(value != value ? bits >> 16 | 0x40u : rounded);
}

#if defined(__AVX512F__)
inline Floats from_halves(Halves halves) {
  return __builtin_bit_cast(Floats,
                            _mm512_maskz_cvtph_ps(kAll, __builtin_bit_cast(__m256i, halves)));
}
inline Halves to_halves(Floats value) {
  return __builtin_bit_cast(Halves, _mm512_maskz_cvtps_ph(kAll, __builtin_bit_cast(__m512, value),
                                                          _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
inline Floats from_halves(Halves halves) {
  return __builtin_bit_cast(Floats, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, halves)));
}
inline Halves to_halves(Floats value) {
  return __builtin_bit_cast(
      Halves, _mm256_cvtps_ph(__builtin_bit_cast(__m256, value), _MM_FROUND_TO_NEAREST_INT));
}
#else
/// Both directions without branches, after Marat Dukhan's FP16 library: the rounding is left to an
/// addition or a multiplication.
inline Floats from_halves(Halves halves) {
  const Words bits = widened(halves);
  const Words sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const Words normal = bits_of(floats_of((magnitude << 13) + (0xe0u << 23)) * 0x1p-112f);
  const Words tiny = bits_of(floats_of(magnitude | (126u << 23)) - 0.5f);
  return floats_of(sign | (static_cast<Words>(magnitude < 0x400u) & tiny) |
                   (static_cast<Words>(magnitude >= 0x400u) & normal));
}
inline Halves to_halves(Floats value) {
  const Words bits = bits_of(value);
  const Words sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Floats overflowed = (floats_of(magnitude) * 0x1p112f) * 0x1p-110f;
  const Words exponent = magnitude & 0x7f800000u;
  const Words bias = exponent < 0x38800000u ? Words{} + 0x38800000u : exponent;
  const Words sum = bits_of(floats_of(bias + 0x07800000u) + overflowed);
  const Words rounded = (sum >> 13 & 0x7c00u) + (sum & 0x0fffu);
  return narrowed(sign | (value != value ? Words{} + 0x7e00u : rounded));
}
#endif

/// A format: `kLanes` elements of `kBytes` bytes each, together a `Stored`, are computed as one
/// `Value` of `Scalar`s.
template <class T>
struct Plain {
  using Scalar = T;
  using Value = Vector<T>;
  using Stored = Value;
  static constexpr std::size_t kBytes = sizeof(T), kLanes = kVectorBytes / kBytes;
  static Value unpack(Stored stored) { return stored; }
  static Stored pack(Value value) { return value; }
};
template <Floats (*kUnpack)(Halves), Halves (*kPack)(Floats)>
struct SixteenBits {
  using Scalar = float;
  using Value = Floats;
  using Stored = Halves;
  static constexpr std::size_t kBytes = 2, kLanes = kFloats;
  static Value unpack(Stored stored) { return kUnpack(stored); }
  static Stored pack(Value value) { return kPack(value); }
};
using Half = SixteenBits<from_halves, to_halves>;
using BFloat = SixteenBits<from_bfloats, to_bfloats>;
struct Truth : Plain<std::uint8_t> {
  static Value unpack(Stored stored) { return stored != 0 ? Value{} + 1 : Value{}; }
};

struct Sum {
  template <class V>
  static V combine(V a, V b) {
    return a + b;
  }
};
/// NaN wins: `b` is taken where it is less or a NaN, and nothing is less than a NaN already in `a`.
struct Min {
  template <class V>
  static V combine(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class V>
  static V combine(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
/// And, Or and Xor combine integers.
struct And {
  template <class V>
  static V combine(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static V combine(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static V combine(V a, V b) {
    return a ^ b;
  }
};

}  // namespace
}  // namespace hvd::kernels::detail
