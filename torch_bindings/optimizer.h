#pragma once
/// Room card: the optimizer wrapper. Every gradient is reduced over the ranks while backward still runs; `step()` waits for the
/// reductions and lets the wrapped optimizer step. Gradients on the host live in memory that the ranks of the host share, so that
/// they are reduced where they are: `.grad` is a view of it.
/// Refused with InvalidArgument: backward(create_graph = true), in the backward pass; gradients that are changed (clipped) between
/// `backward()` and `synchronize()` or `step()` while they are on their way, at that call; more backward passes than agreed. In a world of
/// one, changes simply count. A parameter whose type, device or shape changes later is followed.
/// Throwing gradients away: `zero_grad()`. The module's `zero_grad()` is recognised if it drops (does not zero) the gradients of the whole
/// optimizer; what is on its way is then finished first, so each rank must have thrown away something, or none.
/// Threads: hooks run in autograd's threads; everything else is called by one thread at a time.
/// Owns the gradients' memory; refers to the wrapped optimizer, which must outlive it.

#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

struct DistributedOptimizerOptions {
  /// int8, topk and powersgd: see torch_bindings/compressor.h. Those gradients travel when all are there, not while backward runs.
  Compression compression;
  /// Average or Sum (Min, Max and Product are refused: absent gradients count as zeros).
  ReduceOp op = ReduceOp::Average;
  /// Backward passes whose gradients are added up on each rank before one reduction. The sum is not divided by it.
  int backward_passes_per_step = 1;
  /// With Average only: gradients are divided by it before the sum, and by size / it after.
  double gradient_predivide_factor = 1;
  /// How gradients travel together: by size (default), in this many groups, or in these groups (parameters in none go by size).
  std::variant<std::monostate, int, std::vector<std::vector<at::Tensor>>> groups;
  ProcessSet process_set;
  /// Make sparse gradients dense before they are reduced; otherwise they travel as indices and values, and stay sparse.
  bool sparse_as_dense = false;
  /// ZeRO stage 1 (torch_bindings/optimizer_shards.h): each rank updates its share of the parameters, has the state of that share alone,
  /// and gets the rest from the others; the parameters are those of the plain optimizer, bit for bit. For all optimizers of LibTorch but
  /// LBFGS (InvalidArgument). An optimizer of the user's own shares whole parameters, and its state cannot be saved.
  bool shard_optimizer_state = false;
  /// `.grad` is a view of the memory that gradients are reduced in, the same at every step: a gradient that is kept (`auto g = p.grad()`)
  /// is overwritten by the next backward pass, also after zero_grad(); clone it, or set this to false. Then `.grad` is a tensor of its own,
  /// as LibTorch makes it, for the price of the gradients' memory once more and of copying what is reduced.
  bool gradients_are_views = true;
};

class GradientReducer;
class OptimizerShards;

namespace detail {
/// Makes LBFGS fit for torch::save, which cannot write the undefined tensors of its scratch space; LBFGS makes that anew by itself.
void drop_scratch(torch::optim::Optimizer& optimizer);
}  // namespace detail

class DistributedOptimizer : public torch::optim::Optimizer {
 public:
  /// `named_parameters` must name every parameter of `wrapped`, once; empty: names are made up from their places. Wrapping is local:
  /// nothing is sent. Throws InvalidArgument for names or options that are wrong, naming them, and for a parameter whose gradient a
  /// DistributedDataParallel has reduced at present. Of several optimizers around the same parameters the last one reduces during backward.
  explicit DistributedOptimizer(torch::optim::Optimizer& wrapped, std::vector<std::pair<std::string, at::Tensor>> named_parameters = {},
                                DistributedOptimizerOptions options = {});
  /// From what `named_parameters()` of a module gives. A template, so that braces mean the list of pairs.
  template <class Name>
  DistributedOptimizer(torch::optim::Optimizer& wrapped, const torch::OrderedDict<Name, at::Tensor>& named_parameters,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(wrapped, named_parameters.pairs(), std::move(options)) {}
  ~DistributedOptimizer() override;
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Waits for the reductions, unless a finished `synchronize()` did or `skip_synchronize()` is in force, then steps. With a closure
  /// (LBFGS), every evaluation's gradients and loss are reduced; what is returned is this rank's loss. Throws what `synchronize()` throws.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collective. Reduces what is not yet reduced and waits; afterwards every `.grad` is the same on all ranks. A parameter without a
  /// gradient here counts as zeros if another rank has one, and stays without if none has. Called again, it reduces what backward has
  /// added since, or what a user has put in the place of a gradient, and nothing if there is nothing new; the ranks must agree in that
  /// (else Mismatch, when the next gradients meet). Throws InvalidArgument on a rank whose gradients were changed while on their way, after
  /// it has taken part; Mismatch, RankFailed, Shutdown...
  void synchronize();
  /// What `step()` begins with: `synchronize()`, unless a finished one did that already or `skip_synchronize()` is in force.
  void synchronize_once();
  /// Instead of `step()` when the step is not made (GradScaler): what backward gives next is reduced anew.
  void leave_out_step();

  /// Drops (or zeroes) all gradients; reductions in flight are waited for first.
  void zero_grad(bool set_to_none = true);

  /// While the guard lives, `step()` does not wait for reductions: for gradients that the user has synchronized already.
  class [[nodiscard]] SkipSynchronize {
   public:
    explicit SkipSynchronize(DistributedOptimizer& optimizer) : optimizer_(optimizer) { ++optimizer_.skips_; }
    ~SkipSynchronize() { --optimizer_.skips_; }
    SkipSynchronize(const SkipSynchronize&) = delete;
    SkipSynchronize& operator=(const SkipSynchronize&) = delete;

   private:
    DistributedOptimizer& optimizer_;
  };
  SkipSynchronize skip_synchronize() { return SkipSynchronize(*this); }

  /// Throws InvalidArgument for k < 1.
  void set_backward_passes_per_step(int passes);

  /// The wrapped optimizer's groups (all parameters, also of a sharded one) and state (sharded: of this rank's share). Options changed
  /// through either optimizer hold for both from the next `step()`, `synchronize()`, `save` or call of this on; if both changed, the
  /// wrapper's.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups();
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state();
  /// Sharded, its groups hold pieces of parameters while this lives.
  torch::optim::Optimizer& wrapped() { return wrapped_; }
  /// What this rank remembers with the compressions that need it, in a fixed order: a checkpoint saves it, and fills it in place.
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;
  /// Bytes of gradients that this rank has sent so far to other ranks, if each collective sends as few as it can: a measure that does not
  /// depend on where the ranks are. Sparse gradients are not counted.
  [[nodiscard]] std::uint64_t bytes_sent() const;
  [[nodiscard]] bool is_sharded() const { return shards_ != nullptr; }

  /// What the wrapped optimizer writes and reads. Sharded, saving is collective and writes what an optimizer that is not sharded would;
  /// loading takes this rank's share of that, whatever the number of ranks that wrote it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void share_options();

  torch::optim::Optimizer& wrapped_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> shared_options_;  ///< as both had them last
  std::shared_ptr<GradientReducer> reducer_;
  std::unique_ptr<OptimizerShards> shards_;  ///< null unless sharded
  int skips_ = 0;
};

}  // namespace hvd
