#pragma once
/// A Signature is a rank's word about a tensor when it introduces it; the verdicts are over the
/// words of all ranks. Pure values and functions: every rank computes the same verdicts from the
/// same signatures.
// Tested in tests/hvd/negotiation/signature_test.cc, tests/contract/cases/into_cases.cc

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/base/visible.h"
#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/types.h"

namespace hvd {

struct TensorSignature {
  DataType dtype = DataType::Float32;
  Shape shape;
  /// For each rank of the set, in the set's order: rows (Alltoall), or elements (Reducescatter that
  /// is not split by rows); else empty.
  std::vector<std::int64_t> splits;
  std::int64_t output_rows =
      -1;  ///< Allgather, Alltoall: rows of the memory that the result goes to; -1: as many as come
  bool operator==(const TensorSignature&) const = default;
};

/// All that must agree between ranks for one submission: a tensor, or a group of tensors that
/// become ready together.
struct Signature : OperationTerms {
  DeviceKind device = DeviceKind::Cpu;
  std::vector<TensorSignature> tensors;
  bool operator==(const Signature&) const = default;
};

void encode(Writer& writer, const Signature& signature);
/// Throws WireError on malformed input; allocates no more than the input's size asks for.
Signature decode_signature(Reader& reader);

using SharedSignature = std::shared_ptr<const Signature>;

/// Returns whether a tensor may have this shape: no size is negative, and there are not more
/// elements than any memory has.
HVD_BETWEEN_LIBRARIES bool has_possible_sizes(const Shape& shape);
/// Returns whether sizes, and for Alltoall splits among `ranks`, can be those of a tensor that a
/// rank has submitted.
bool is_plausible(const Signature& signature, std::size_t ranks);

/// Rows of a first dimension of `rows` that rank `place` of `size` keeps after a reducescatter: the
/// first `rows % size` get one more.
HVD_BETWEEN_LIBRARIES std::int64_t scattered_rows(std::int64_t rows, std::size_t size,
                                                  std::size_t place);

/// Ok, or a Mismatch whose text names the tensor and groups the ranks by what they sent, for the
/// first thing that differs in the order dtype, op, shape, scales, reduce op, per-op rules, device.
/// `ranks[i]` is the global rank that sent `signatures[i]`.
Status verdict(std::string_view name, std::span<const int> ranks,
               std::span<const SharedSignature> signatures);

/// The check of an Allgather or Alltoall into memory that exists, beyond equal signatures: each
/// rank's memory must have as many rows as come to it, which follows from what all ranks send.
/// Returns Ok, or a Mismatch whose text says how many rows come to each rank and how many its
/// memory has. `ranks` are those of the process set, all of which take part; `said(i)` is the
/// signature of the i-th. Call it for signatures on which `verdict` is Ok.
Status verdict_on_outputs(std::string_view name, std::span<const int> ranks,
                          const std::function<const Signature&(std::size_t)>& said);

/// "ranks 0-2: float32 [17, 3]; rank 3: float32 [18, 3]", groups in order of their first rank;
/// `ranks[i]` said `said[i]`.
HVD_BETWEEN_LIBRARIES std::string grouped_by_rank(std::span<const int> ranks,
                                                  std::span<const std::string> said);

}  // namespace hvd
