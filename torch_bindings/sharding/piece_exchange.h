#pragma once
/// The exchange of pieces' tensors, which travel from their owners to other ranks. All functions
/// that send are collective over the process set. Thread: the optimizer's. Refers to the pieces.
/// Errors: what a broadcast and an alltoall throw.
// Tested in tests/torch_bindings/checkpoint/checkpoint_run_test.cc,
// tests/torch_bindings/sharding/optimizer_shards_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/sharding/shard_pieces.h"

namespace hvd::detail {

class PieceExchange {
 public:
  /// `owners`: by share, the rank that has it. `name` begins those of its collectives.
  PieceExchange(const ShardPieces& pieces, ProcessSet process_set, std::vector<int> owners,
                std::string name);

  [[nodiscard]] const std::vector<int>& owners() const { return owners_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const ProcessSet& process_set() const { return process_set_; }
  /// Returns whether the piece comes from this rank: on one host those of its share.
  [[nodiscard]] bool owns(const ShardPiece& piece) const {
    return owners_[piece.owner] == hvd::rank();
  }
  /// Returns whether this rank is to have what is put together: all are, or `only` one.
  [[nodiscard]] static bool gets_whole(std::optional<int> only);
  /// Sends one tensor for each piece from its owner to all; undefined ones stay. A submission for
  /// each owner and device.
  void broadcast(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  /// Brings the text of each share's owner to `twins`, ranks of other hosts that have that share,
  /// in portions. Returns what came; nothing on an owner, who alone names twins and gives a text.
  [[nodiscard]] std::string to_twins(const std::string& text, const std::vector<int>& twins) const;
  /// Brings `own` of each piece from its owner into `whole`: on every rank, or on `only` one. There
  /// it comes in portions, as bytes in the order of the pieces, so that the other ranks need no
  /// memory to speak of. `bytes`: of each piece, on all ranks.
  void gather(const std::vector<at::Tensor>& whole, const std::vector<at::Tensor>& own,
              const std::vector<std::int64_t>& bytes, const std::string& what,
              std::optional<int> only) const;

 private:
  const ShardPieces& pieces_;
  const ProcessSet process_set_;
  const std::vector<int> owners_;
  const std::string name_;
};

}  // namespace hvd::detail
