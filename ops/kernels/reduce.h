#pragma once
/// This is element-wise arithmetic on host memory: it reduces the buffers of several ranks, and
/// converts between float types. All are pure functions of their arguments: any thread may call
/// them, they keep no state and allocate nothing. Preconditions are the caller's
/// (`supported`); a pair that is not supported throws std::invalid_argument, and nothing else
/// fails.
///
/// What an element becomes depends on the inputs of that element alone: not on position, alignment,
/// count or instruction set. The one exception is the payload of a NaN: NaN stays NaN everywhere,
/// its other bits are unspecified.

#include <cstddef>
#include <span>
#include <string_view>

#include "hvd/types.h"

namespace hvd::kernels {

/// An Isa says which compilation of the kernels runs. Baseline is what every processor of the
/// architecture has.
enum class Isa { Baseline, Avx2, Avx512 };

/// Returns the widest that this processor and this build have.
Isa best_isa();
bool available(Isa isa);
/// "baseline", "avx2", "avx512"
std::string_view name_of(Isa isa);

/// A Reduction says what to do with an element.
struct Reduction {
  DataType dtype = DataType::Float32;  ///< of the inputs
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;   ///< multiplies every input
  double postscale = 1;  ///< multiplies the result
  int divisor = 1;       ///< Average only: number of ranks, which may be more than there are inputs
  /// The type of the outputs: equal to `dtype`, or Float32 where `dtype` is Float16 or BFloat16.
  DataType output = DataType::Float32;
};

/// Real types: Average, Sum, Min, Max, Product. Bool: Min (and), Max (or). Integers and Bool:
/// BitAnd, BitOr, BitXor. Complex: Average, Sum, Product. Adasum is none of these.
bool supported(DataType dtype, ReduceOp op);

/// For i in [0, count): the fold over r, ascending, of prescale * in[r][i], divided by `divisor`
/// where the operation is Average, times postscale, is written into every out[j][i]. `out[j]` may
/// be the same pointer as an `in[r]` if input and output type are equal; no other overlap. Pointers
/// need no alignment. No input at all gives zeros.
///
/// Floats: Float16 and BFloat16 are converted to float, folded and scaled there, and rounded once
/// (to nearest even; overflow gives
///   infinity). Scales are rounded to the type of the arithmetic first (float, or double for
///   Float64). Average divides. Min and Max:
///   a NaN in any input gives NaN; of equal values (-0 and +0) the lowest rank's is kept.
/// Integers: sums and products wrap modulo 2^bits. Average is the exact sum divided, truncating
/// toward zero. A scale multiplies in
///   double and truncates toward zero, clamped to the type's range (a NaN gives 0); prescale does
///   so before, postscale after.
/// Bool: any byte but 0 is true; the result is 0 or 1; scales are ignored.
/// Complex: scaled and divided by real numbers; Product is (ac - bd) + (ad + bc)i without recovery
/// of infinities.
void reduce(const Reduction& reduction, std::span<const void* const> in, std::span<void* const> out,
            std::size_t count);
/// Does the same by a given instruction set, which must be available.
void reduce(Isa isa, const Reduction& reduction, std::span<const void* const> in,
            std::span<void* const> out, std::size_t count);

/// dst[i] = scale * src[i], rounded once more into the destination's type, to nearest even.
/// Float16, BFloat16, Float32, Float64, any to any; the multiplication is in double where one of
/// the two is Float64, otherwise in float. `dst` may equal `src` if the types are equal; no other
/// overlap. The same type with scale 1 is a plain copy, for every DataType.
void convert(void* dst, DataType dst_type, const void* src, DataType src_type, std::size_t count,
             double scale = 1);
void convert(Isa isa, void* dst, DataType dst_type, const void* src, DataType src_type,
             std::size_t count, double scale = 1);

/// These are the plain scalar versions: what everything else is tested against, and what runs where
/// no vector kernel exists.
void reduce_scalar(const Reduction& reduction, std::span<const void* const> in,
                   std::span<void* const> out, std::size_t count);
void convert_scalar(void* dst, DataType dst_type, const void* src, DataType src_type,
                    std::size_t count, double scale = 1);

}  // namespace hvd::kernels
