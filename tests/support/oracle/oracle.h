#pragma once
/// What the results of collectives should be, for the contract suite and for random programs.
/// Shares no code with the library beyond the enumerations of hvd/types.h: its own table of types,
/// its own 16-bit floats, its own folding in rank order. Written to be read; one element at a time.
/// Pure functions, any thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/types.h"

namespace hvd::oracle {

using Block = std::vector<std::byte>;

inline constexpr int kTypes = 12;
inline constexpr DataType kAllTypes[kTypes] = {
    DataType::UInt8,   DataType::Int8,    DataType::Int16,     DataType::Int32,
    DataType::Int64,   DataType::Float16, DataType::BFloat16,  DataType::Float32,
    DataType::Float64, DataType::Bool,    DataType::Complex64, DataType::Complex128};
inline constexpr ReduceOp kAllReductions[] = {
    ReduceOp::Average, ReduceOp::Sum,    ReduceOp::Min,   ReduceOp::Max,   ReduceOp::Product,
    ReduceOp::Adasum,  ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor};

const char* type_name(DataType dtype);
std::size_t type_bytes(DataType dtype);
const char* reduction_name(ReduceOp op);
std::string shape_text(const Shape& shape);
std::size_t count_of(const Shape& shape);
bool is_whole(DataType dtype);  ///< integers; Bool is none
bool is_float(DataType dtype);  ///< real floating point, 16 bits included
bool is_complex_type(DataType dtype);

/// Whether docs/semantics.md, "Arithmetic", has the pair: all reductions of real numbers (Adasum of
/// floats only, bits of integers only), Min, Max and bits of Bool, Sum and Average of complex
/// numbers.
bool allreduce_is_defined(DataType dtype, ReduceOp op);

/// How the values of a tensor are drawn.
enum class Values : std::uint8_t {
  Full,     ///< integers of the whole range, floats with all their bits
  Limited,  ///< integers so small that no sum, scaled by at most 1.5, leaves the type
  Exact,    ///< small whole numbers: sums are exact in every type, in every order
};
/// The values of `rank` (of `ranks` that combine theirs with `op`): they differ by rank, element
/// and `salt`.
Block make_values(DataType dtype, ReduceOp op, Values values, int rank, int ranks,
                  std::size_t count, std::uint64_t salt);
/// Any bytes, for what is only moved; Bool is 0 or 1.
Block make_bytes(DataType dtype, int rank, std::size_t count, std::uint64_t salt);

/// What the reduction of `inputs`, one for each rank in their order, must give.
struct Expected {
  DataType dtype = DataType::Float32;
  Block bytes;
  std::vector<double> bound;  ///< by element (real and imaginary parts apart): how far off it may
                              ///< be; empty: not at all
  /// Adasum: whether vectors nearly cancel out on the way. Of what is left then, rounding decides
  /// the direction.
  bool cancels = false;
};
struct Reduction {
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  std::size_t divisor = 0;  ///< of an average; 0: as many as there are inputs
};
/// The fold in rank order, in the arithmetic of docs/semantics.md. `any_order`: with the bounds of
/// a sum whose order and intermediate roundings are the transport's own. Adasum always has bounds.
Expected reduced(const Reduction& reduction, const std::vector<Block>& inputs, bool any_order);
/// For each domain, the lowest rank's first: the places of its ranks among the inputs, ascending.
using Domains = std::vector<std::vector<std::size_t>>;
/// As docs/semantics.md, "Arithmetic", has it for ranks that share no memory: what is in no domain
/// are zeros of ranks that have joined.
Expected reduced_by_domains(const Reduction& reduction, const std::vector<Block>& inputs,
                            const Domains& domains);

/// What all ranks put in and must get, worked out once for the ranks that are threads of this
/// process and ask at about the same time.
struct Worked {
  std::vector<Block> inputs;
  Expected expected;
};
std::shared_ptr<const Worked> worked_out(const std::string& key,
                                         const std::function<Worked()>& work);

/// "", or the first element that is wrong. A NaN equals every other, and a zero the one of the
/// other sign.
std::string difference(const Expected& expected, const std::byte* got);
std::string difference(DataType dtype, const Block& expected, const std::byte* got);

}  // namespace hvd::oracle
