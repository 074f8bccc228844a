#pragma once
/// One optimizer's work, shared out over the ranks: ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory
/// Optimizations Toward Training Trillion Parameter Models", SC 2020). Each rank updates its share
/// of the parameters, keeps the state of that share alone, and gets the other shares from their
/// owners. The share: one run of all parameters laid end to end, cut where 1/size of the bytes
/// ends, also within a parameter; with shares of gradients, one run of each bucket in which
/// gradients travel, so that all ranks have an equal part in each; whole parameters for optimizers
/// of the user's own, also those that derive from one of LibTorch, which may look at all of one. A
/// parameter that a group lists several times is cut once, and stepped as often as it is listed.
/// Parameters on the host move into memory that the ranks share, unless something else refers to
/// their storage. With `share_parameters` there is one copy of the parameters per host
/// (torch_bindings/parameters/shared_parameters.h), the shares are those of the ranks of a host,
/// and nothing is sent after a step. Thread: the optimizer's. Errors: InvalidArgument (LBFGS; an
/// optimizer whose state is in shares already, or that has been stepped by itself); what a
/// broadcast throws. Owns the pieces. The wrapped optimizer's groups hold whole parameters but
/// while it steps; its state is that of this rank's pieces. How parameters are cut:
/// torch_bindings/sharding/shard_pieces.h.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/gradients/gradient_memory.h"
#include "torch_bindings/parameters/shared_parameters.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/sharding/gradient_shares.h"
#include "torch_bindings/sharding/piece_exchange.h"
#include "torch_bindings/sharding/shard_pieces.h"
#include "torch_bindings/sharding/sharded_state.h"

namespace hvd::detail {
class CheckpointReader;
}  // namespace hvd::detail
namespace hvd {

class OptimizerShards {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  using Runs = detail::ShardRuns;

  /// Shares the optimizer out. Local. `masters`: of the optimizer's 16-bit parameters, which this
  /// has from now on until `give_back()`; null without them. `name` tells the optimizers of a
  /// process apart, equally on all ranks; `parameters` are those of the groups, each once. State
  /// that the optimizer has already is cut too.
  OptimizerShards(torch::optim::Optimizer& wrapped, const ProcessSet& process_set, std::string name,
                  const Named& parameters, bool share_parameters = false,
                  detail::MasterCopies* masters = nullptr, const Runs& runs = {});
  /// Leaves the wrapped optimizer without a state that it could use: this rank's share is lost,
  /// unless `give_back()` was called, and stepping the optimizer or wrapping it again is an error.
  ~OptimizerShards();

  /// From now on this rank has its shares of the gradients alone, which come by what is returned:
  /// ZeRO stage 2.
  [[nodiscard]] GradientKeeper& keep_gradients();
  [[nodiscard]] detail::GradientShares& gradients() { return gradients_; }

  /// Throws InvalidArgument, naming unshard(), if the optimizer's state is in shares: of a wrapper
  /// that lives, or of one that has ended.
  static void refuse_shares(const torch::optim::Optimizer& optimizer);

  /// After the wrapped optimizer's groups have changed: shares out the parameters from place
  /// `first` on of all that there are now. Local. Throws InvalidArgument, before anything changes,
  /// where a state from before has another shape than its parameter.
  void add(const Named& parameters, std::size_t first, const Runs& runs = {});
  /// Throws InvalidArgument if the wrapped optimizer was stepped by itself, by its state.
  void check_untouched();

  /// While the wrapped optimizer steps, its groups hold this rank's pieces, with their parts of the
  /// gradients, from `lend()` to `take_back()`; each does nothing where it is so already. A
  /// `lend()` that throws leaves whole parameters there.
  void lend();
  void take_back();
  /// Before it, and after all gradients are there: collective where there is one copy of the
  /// parameters, and where this rank refuses to make a step. With a `refusal` on any rank, all
  /// throw Mismatch with its words, here or at `end_update()`, and the parameters are the same on
  /// all ranks still.
  void begin_update(const std::string& refusal = {});
  /// After it: collective, every parameter becomes what its owners made of it. With a `failure` on
  /// any rank, all throw Mismatch with its words.
  void end_update(const std::string& failure = {});
  /// Does it on a rank whose update has failed, if that had begun.
  void fail_update(const std::string& failure);
  /// While the wrapped optimizer evaluates a closure, its groups hold whole parameters, and nobody
  /// updates them.
  void interrupt_update();
  void resume_update();
  /// Returns whether there is one copy of the parameters per host.
  [[nodiscard]] bool shares_parameters() const { return shared_ != nullptr; }
  /// Returns whether this rank is the one of its host that writes parameters for all of them.
  [[nodiscard]] bool is_writer() const { return !shared_ || self_ == 0; }

  /// Collective. Gives the wrapped optimizer the whole state, on every rank; then this can end.
  /// Throws InvalidArgument, on all ranks, if LibTorch does not know the optimizer, and it has
  /// states that cannot be written or copied.
  void give_back();
  /// Collective. Writes what the wrapped optimizer would write had it not been shared out. All
  /// ranks have the whole state for that time; with `only`, a rank, that one alone, and the others
  /// write nothing.
  void save(torch::serialize::OutputArchive& archive, std::optional<int> only = {});
  /// Keeps this rank's share of the whole state that `load_wrapped` gives the wrapped optimizer.
  /// Local. The old state stays if that throws, or if one of a parameter in any share has another
  /// shape, which is InvalidArgument on all ranks. `reader`: of tensors whose values are in a file
  /// still; then the share has them when it has read. Null: there are none.
  void load(const std::function<void()>& load_wrapped, torch::serialize::InputArchive& archive,
            detail::CheckpointReader* reader = nullptr);
  /// Returns what brings the masters of this rank's share back to what they are now.
  [[nodiscard]] std::function<void()> remember_masters();

 private:
  using Piece = detail::ShardPiece;

  void check_states(detail::NamedParameters parameters) const;
  [[nodiscard]] detail::ShardPieces cut(detail::NamedParameters parameters, const Runs& runs) const;
  void make_tensor(Piece& piece, const detail::MasterCopies::Masters& masters) const;
  void follow_memory();
  void arrange();
  void mark();
  [[nodiscard]] bool has_state() const;
  [[nodiscard]] bool is_lent_apart(const Piece& piece) const;
  void share_pieces(const std::string& refusal);
  [[nodiscard]] std::string equalize_hosts();

  detail::HostMemoryUser uses_host_memory_;  // outlives all that has some
  torch::optim::Optimizer& wrapped_;
  const ProcessSet process_set_;
  const std::unique_ptr<SharedParameters> shared_;  ///< null where each rank has a copy of its own
  const std::size_t self_;                          ///< the share of this rank
  detail::MasterCopies* const masters_;
  const bool is_known_;  ///< LibTorch knows the optimizer, or what it derives from
  detail::ShardPieces pieces_;
  const detail::PieceExchange
      exchange_;  ///< by share: with one copy per host, the ranks of the first host own them
  const detail::ShardedState state_;
  detail::GradientShares gradients_{pieces_};
  std::vector<std::vector<at::Tensor>>
      shares_;  ///< by group: this rank's pieces; while they are lent, the whole parameters
  std::size_t states_checked_ = 0;  ///< states when `check_untouched()` last looked
  bool lent_ = false;
  bool updating_ = false;  ///< between `begin_update()` and the end of the update
  bool stepped_ = false;   ///< there has been a step, or a state from before
  bool given_back_ = false;
  std::size_t begun_ = 0;  ///< pieces that an update has begun with, on all ranks
};

}  // namespace hvd
