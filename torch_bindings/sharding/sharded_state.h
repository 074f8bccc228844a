#pragma once
/// An optimizer's state of which each rank has that of its pieces: put together, and dealt again.
/// Thread: the optimizer's. Refers to the optimizer, whose `state()` holds this rank's, to the
/// pieces and to their exchange. Errors: InvalidArgument, on all ranks, for an optimizer or a state
/// that LibTorch does not know, and that cannot be copied and written; what the exchange throws.
// Tested in tests/torch_bindings/sharding/optimizer_shards_test.cc,
// tests/torch_bindings/what_if/what_if_sharded_test.cc

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>

#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/sharding/piece_exchange.h"
#include "torch_bindings/sharding/shard_pieces.h"

namespace hvd::detail {

class CheckpointReader;

class ShardedState {
 public:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  ShardedState(torch::optim::Optimizer& wrapped, const ShardPieces& pieces,
               const PieceExchange& exchange)
      : wrapped_(wrapped), pieces_(pieces), exchange_(exchange) {}

  /// Collective. Returns the whole state, by parameter, on all ranks or `only` one. Shares stay.
  [[nodiscard]] States gather(std::optional<int> only = {}) const;
  /// Collective. Returns the masters of all 16-bit parameters, likewise.
  [[nodiscard]] MasterCopies::Masters gather_masters(std::optional<int> only = {}) const;
  /// Collective. Gives the states and masters of each share's owner to its `twins`, ranks of other
  /// hosts that have that share, as they write themselves. Returns why this rank has kept its own:
  /// its owner cannot write one, or there is none of its kind here to read into; empty if it has
  /// not.
  [[nodiscard]] std::string spread(const std::vector<int>& twins) const;
  /// Throws InvalidArgument if a tensor of the whole state has another shape than the parameter.
  static void check(torch::optim::OptimizerParamState& state, const std::string& name,
                    const at::Tensor& parameter);
  /// Gives the optimizer this rank's share of `whole`, which is by parameter, once it has checked
  /// all of it, as every rank does. `reader`: of tensors whose values are in a file still.
  void keep(States whole, CheckpointReader* reader = nullptr) const;

 private:
  [[nodiscard]] States gather_unknown(std::optional<int> only) const;
  [[nodiscard]] States gather_parts(const at::Tensor& known, std::optional<int> only) const;
  [[nodiscard]] torch::optim::OptimizerParamState* state_of(const ShardPiece& piece) const;
  [[nodiscard]] torch::optim::OptimizerParamState* own_model() const;
  void write_own(torch::serialize::OutputArchive& archive) const;
  [[nodiscard]] std::string written_for_twins() const;
  [[nodiscard]] std::unique_ptr<torch::optim::OptimizerParamState> read_own(
      torch::serialize::InputArchive& archive, std::size_t piece) const;
  [[nodiscard]] static at::Tensor part_of(const at::Tensor& whole, const ShardPiece& piece,
                                          CheckpointReader* reader);

  torch::optim::Optimizer& wrapped_;
  const ShardPieces& pieces_;
  const PieceExchange& exchange_;
};

}  // namespace hvd::detail
