#pragma once
/// Room card: one optimizer's work, shared out over the ranks: ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
/// Training Trillion Parameter Models", SC 2020). Each rank updates its share of the parameters, keeps the state of that share alone,
/// and gets the other shares from their owners. The share: one run of all parameters laid end to end, cut where 1/size of the bytes
/// ends, also within a parameter; whole parameters for optimizers that LibTorch does not know, which may look at all of one.
/// Parameters on the host move into memory that the ranks share, unless something else refers to their storage.
/// Thread: the optimizer's. Errors: InvalidArgument; what a broadcast throws.
/// Owns the pieces; while it lives, the wrapped optimizer's groups hold the pieces of this rank in place of the parameters.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

class OptimizerShards {
 public:
  /// Local. `name` tells the optimizers of a process apart, equally on all ranks. State that the optimizer has already is cut too.
  OptimizerShards(torch::optim::Optimizer& wrapped, const ProcessSet& process_set, std::string name);
  ~OptimizerShards();
  OptimizerShards(const OptimizerShards&) = delete;
  OptimizerShards& operator=(const OptimizerShards&) = delete;

  /// Before the wrapped optimizer steps: the pieces get their parts of the parameters' gradients.
  void lend_gradients();
  /// After it: collective, every parameter becomes what its owners made of it.
  void share_parameters();

  /// Collective: what the wrapped optimizer would write had it not been shared out. All ranks have the whole state for that time.
  void save(torch::serialize::OutputArchive& archive);
  /// Local: keeps this rank's share of a whole state. The old state stays if the archive cannot be read.
  void load(torch::serialize::InputArchive& archive);

 private:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;
  /// Elements [begin, end) of a parameter, in the order of its memory.
  struct Piece {
    std::size_t group = 0, place = 0;  ///< of the parameter, in `whole_`
    std::int64_t begin = 0, end = 0;
    std::size_t owner = 0;              ///< rank in the process set
    at::Tensor tensor;                  ///< the parameter itself if the piece is all of it
    at::Tensor travels;                 ///< the same elements, dense
    std::vector<std::int64_t> strides;  ///< of the parameter
  };

  void move_into_shared_memory();
  void cut(bool within_parameters);
  void make_views();
  [[nodiscard]] at::Tensor view_of(const Piece& piece) const;
  void follow_memory();
  void install();
  [[nodiscard]] const at::Tensor& parameter_of(const Piece& piece) const { return whole_[piece.group][piece.place]; }
  [[nodiscard]] bool is_whole(const Piece& piece) const;
  [[nodiscard]] bool is_mine(const Piece& piece) const { return piece.owner == self_; }
  void broadcast_pieces(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  [[nodiscard]] States gather_state();
  void keep_share(States whole);

  torch::optim::Optimizer& wrapped_;
  const ProcessSet process_set_;
  const std::vector<int> ranks_;
  const std::size_t self_;
  const std::string name_;
  std::vector<std::vector<at::Tensor>> whole_;  ///< the parameters, as the wrapped optimizer's groups had them
  std::vector<Piece> pieces_;
};

}  // namespace hvd
