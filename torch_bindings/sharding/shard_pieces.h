#pragma once
/// The pieces in which an optimizer's work is shared out over ranks, and how parameters are cut
/// into them. Functions and values only; any thread. Throw nothing.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "torch_bindings/precision/master_copies.h"

namespace hvd::detail {

/// Elements [begin, end) of a parameter, in the order of its memory.
struct ShardPiece {
  std::string name;  ///< of the parameter
  at::Tensor parameter;
  std::int64_t begin = 0, end = 0;
  std::size_t owner = 0;    ///< the share that it is in
  bool is_mine = false;     ///< it is in the share of this rank
  bool has_master = false;  ///< its owner steps a master in fp32, of a 16-bit parameter
  at::Tensor tensor;        ///< what is stepped: the parameter if the optimizer must see all of it
  at::Tensor travels;       ///< the same elements, dense
  std::vector<std::int64_t> sizes, strides;  ///< of the parameter
  std::optional<MasterCopy> master;          ///< of this rank's piece, where there are masters
  at::Tensor gradient;  ///< this rank's share of it, where `.grad` does not have it

  [[nodiscard]] bool is_whole() const { return begin == 0 && end == parameter.numel(); }
  /// Returns the elements where they are, dense; all of a parameter whose memory has gaps.
  [[nodiscard]] at::Tensor view() const;
  [[nodiscard]] at::ScalarType state_type() const {
    return has_master ? at::kFloat : parameter.scalar_type();
  }
  /// Returns the bytes of one tensor of the state.
  [[nodiscard]] std::int64_t state_bytes() const {
    return (end - begin) * static_cast<std::int64_t>(c10::elementSize(state_type()));
  }
};

using ShardPieces = std::vector<ShardPiece>;
using NamedParameters = std::span<const std::pair<std::string, at::Tensor>>;
/// Parameters that are laid end to end and cut together; none: all are.
using ShardRuns = std::vector<std::vector<at::Tensor>>;

/// Cuts the parameters into pieces, each run as if its parameters lay end to end, into `shares`
/// shares of equal bytes. `known`: the pieces from before; without runs the share that has least of
/// them comes first.
ShardPieces cut_into_shares(NamedParameters parameters, const ShardRuns& runs, std::size_t shares,
                            const ShardPieces& known);
/// Deals whole parameters, the largest first, each to the share that has least.
ShardPieces deal_to_shares(NamedParameters parameters, std::size_t shares,
                           const ShardPieces& known);

}  // namespace hvd::detail
