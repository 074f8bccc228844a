#pragma once
/// DistributedOptimizer is the optimizer wrapper. Every gradient is reduced over the ranks while
/// backward still runs; `step()` waits for the reductions and lets the wrapped optimizer step.
/// Gradients on the host live in memory that the ranks of the host share, so that they are reduced
/// where they are: `.grad` is a view of it.
///
/// A parameter that a group lists twice (tied weights) is one parameter: reduced once, its names
/// joined in messages, and stepped as often as the wrapped optimizer would. A parameter whose type,
/// device or shape changes is followed; with shard_optimizer_state it is an InvalidArgument. A rank
/// outside the process set trains by itself.
///
/// It refuses, with InvalidArgument: duplicate or missing names; a parameter in two groups; a
/// parameter whose gradient a DistributedDataParallel reduces; an optimizer whose state is in the
/// shares of another wrapper; parameters added to both in different ways, or to an Adagrad; Adasum
/// with shard_optimizer_state, share_parameters, gradient_predivide_factor or a compression that
/// needs a memory; backward(create_graph = true), in the backward pass; gradients that are changed
/// (clipped) between `backward()` and `synchronize()` or `step()` while they are on their way, at
/// that call (in a world of one, changes simply count); more backward passes than agreed. On all
/// ranks it refuses, with a Mismatch that says which rank has done what: groups or parameters added
/// on some ranks only, and, at the next reduction, a `step()` that some ranks have made and others
/// have not (it was refused there, or gradients were thrown away).
///
/// It owns the optimizer that it is given in a std::unique_ptr. One that it is given by reference
/// must outlive it, and is not to be called any more but through this (see `wrapped()`):
/// GradScaler, Checkpoint, broadcast_optimizer_state and MasterWeights find the wrapper.
///
/// Guards (join(), skip_synchronize(), write_parameters()) and a GradScaler follow a move. A
/// scheduler of LibTorch does not: make it after the last move, or on `wrapped()`. What has been
/// moved away throws InvalidArgument from every call, a scheduler's on it included.
///
/// Hooks run in autograd's threads; everything else is called by one thread at a time.

#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/reducer/distributed_options.h"

namespace hvd::detail {
class CheckpointReader;
class MasterCopies;
struct OptimizerParts;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

class JoinGuard;
struct JoinOptions;

namespace detail {
/// Makes LBFGS fit for torch::save, which cannot write the undefined tensors of its scratch space;
/// LBFGS makes that anew by itself.
void drop_scratch(torch::optim::Optimizer& optimizer);
}  // namespace detail

/// A DistributedOptimizer wraps an optimizer, and is one.
class DistributedOptimizer : public torch::optim::Optimizer {
 public:
  /// Wraps `wrapped`. `named_parameters` must name every parameter of it; empty: names are made up
  /// from their places. Local. Throws InvalidArgument, as said above, naming what is wrong. Of
  /// several optimizers around the same parameters the last one reduces during backward.
  explicit DistributedOptimizer(
      torch::optim::Optimizer& wrapped,
      std::vector<std::pair<std::string, at::Tensor>> named_parameters = {},
      DistributedOptimizerOptions options = {});
  /// Does the same from what `named_parameters()` of a module gives. A template, so that braces
  /// mean the list of pairs.
  template <class Name>
  DistributedOptimizer(torch::optim::Optimizer& wrapped,
                       const torch::OrderedDict<Name, at::Tensor>& named_parameters,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(wrapped, named_parameters.pairs(), std::move(options)) {}
  /// Wraps an optimizer that this owns from then on, also where it throws. Throws InvalidArgument
  /// for null, too.
  explicit DistributedOptimizer(
      std::unique_ptr<torch::optim::Optimizer> wrapped,
      std::vector<std::pair<std::string, at::Tensor>> named_parameters = {},
      DistributedOptimizerOptions options = {});
  /// Does the same from what `named_parameters()` of a module gives.
  template <class Name>
  DistributedOptimizer(std::unique_ptr<torch::optim::Optimizer> wrapped,
                       const torch::OrderedDict<Name, at::Tensor>& named_parameters,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(std::move(wrapped), named_parameters.pairs(), std::move(options)) {}
  ~DistributedOptimizer() override;
  /// Takes over all that `other` is, hooks and reductions under way included. Local. Not while a
  /// call of `other` runs.
  DistributedOptimizer(DistributedOptimizer&& other) noexcept;
  /// Ends what this was, and does the same.
  DistributedOptimizer& operator=(DistributedOptimizer&& other) noexcept;

  /// Waits for the reductions, unless a finished `synchronize()` did or `skip_synchronize()` is in
  /// force, then steps. With a closure (LBFGS), every evaluation's gradients and loss are reduced;
  /// what is returned is this rank's loss. Throws what `synchronize()` throws.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Reduces what is not yet reduced and waits. Collective. Afterwards every `.grad` is the same on
  /// all ranks. A parameter without a gradient here counts as zeros if another rank has one, and
  /// stays without if none has. Called again, it reduces what backward has added since, or what a
  /// user has put in the place of a gradient, and nothing if there is nothing new; the ranks must
  /// agree in that (else Mismatch, when the next gradients meet). Throws InvalidArgument on a rank
  /// whose gradients were changed while on their way, after it has taken part; Mismatch,
  /// RankFailed, Shutdown...
  void synchronize();
  /// Does what `step()` begins with. Throws what `synchronize()` throws.
  void synchronize_once();
  /// Compares names, shapes and values of the parameters, and the options of the groups, between
  /// the ranks: all of them, now. Collective. Throws Mismatch, on all ranks, where they differ: it
  /// names parameter or option, the step, and the ranks that differ from the others. Every
  /// reduction does the same piece by piece (Config::replica_guard). What each rank has for itself
  /// (the state, where it is sharded or Adasum's) is not compared.
  void check_replicas();
  /// Ends a step that is not made (GradScaler), instead of `step()`: what backward gives next is
  /// reduced anew.
  void leave_out_step();

  /// Drops (or zeroes) all gradients; reductions in flight are waited for first. The wrapped
  /// optimizer's own does the same to gradients, and so does the module's if it drops (does not
  /// zero) those of the whole optimizer; each rank must have thrown away something then, or none.
  void zero_grad(bool set_to_none = true);

  /// A SkipSynchronize is a guard: while it lives, `step()` does not wait for reductions, for
  /// gradients that the user has synchronized.
  class [[nodiscard]] SkipSynchronize {
   public:
    /// Begins the scope; skip_synchronize() does it.
    explicit SkipSynchronize(DistributedOptimizer& optimizer);
    ~SkipSynchronize() { --*skips_; }
    SkipSynchronize(const SkipSynchronize&) = delete;
    SkipSynchronize& operator=(const SkipSynchronize&) = delete;

   private:
    std::shared_ptr<int> skips_;
  };
  /// Returns a guard for steps after a synchronize() of the user's own.
  SkipSynchronize skip_synchronize() { return SkipSynchronize(*this); }

  /// Returns a guard for ranks with different numbers of batches (torch_bindings/modules/join.h),
  /// around the training loop of all ranks of the set. At its end the parameters and the
  /// optimizer's state are those of the rank that ended last. Parameters may be added meanwhile if
  /// all ranks have added them when their guards end, else these throw Mismatch on all ranks.
  /// Throws InvalidArgument for a sharded optimizer, for a compression with a memory, and while
  /// such a guard lives. This must outlive the guard.
  JoinGuard join(const JoinOptions& options);
  JoinGuard join();  ///< With the default options.

  /// Changes DistributedOptimizerOptions::backward_passes_per_step, from the next step on: where
  /// gradients have left already, one more pass is refused until then. Throws InvalidArgument for
  /// less than 1.
  void set_backward_passes_per_step(int passes);

  /// Says what this rank's gradients count in the next step: the ranks' average becomes sum(n * g)
  /// / sum(n), so that N ranks with batches of different sizes train as one process with all rows.
  /// `n`: the rows (or tokens, words...) that the loss is a mean over, 0 where the rank has none
  /// (its gradients then count as zeros, whatever they are); from 0 to 2^53, any fraction. Where
  /// all ranks say 0 the gradients are zeros. It holds until `step()` has been made (or left out by
  /// a GradScaler), for all reductions and closures until then, and not for the step after it.
  /// Local: the ranks agree on the sum while backward runs, by an allreduce of 8 bytes. Every rank
  /// of the set says one for a step, or none does; else Mismatch, on all ranks, in synchronize() or
  /// step(). With backward_passes_per_step it is the number of rows of all passes, and each loss is
  /// divided by that. Ranks that have ended in a join() count nothing, and its
  /// divide_by_initial_world_size says nothing then. Throws InvalidArgument for a wrong number,
  /// with another op than Average, and once the step's backward has begun or its gradients are
  /// reduced. It says nothing on a rank outside the process set.
  void set_weight(double n);

  /// Gives the wrapped optimizer the whole state, on every rank, and ends the sharding. Collective.
  /// This goes on as a wrapper that is not sharded. Without it, the state of a sharded wrapper ends
  /// with the wrapper, and wrapping or stepping the optimizer after that is an error (its own
  /// `step()` throws c10::Error). Does nothing where nothing is sharded. Throws InvalidArgument, on
  /// all ranks, for an optimizer that LibTorch does not know, where its states do not override
  /// serialize and clone, and with shard_gradients between backward() and step().
  void unshard();

  /// Returns the wrapped optimizer's groups. Groups and parameters that are added, and options of
  /// all types that are changed, through either optimizer hold for both from the next call of this
  /// on; do so on all ranks. Both changed in different ways (a scheduler on each) are an
  /// InvalidArgument that names the option, from that call.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups();
  /// Returns the wrapped optimizer's state; sharded: of this rank's share.
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state();
  /// Returns the wrapped optimizer, which stays where it is when this is moved; the MasterWeights
  /// around it if there is one. It must not be stepped by itself: synchronize(), step(),
  /// zero_grad() or the next backward pass throw InvalidArgument then, as its state shows, or, for
  /// SGD without momentum, the parameters on the host. That of an optimizer of the user's own shows
  /// in ranks that differ alone.
  torch::optim::Optimizer& wrapped();
  /// Returns what this rank remembers with the compressions that need it, in a fixed order: a
  /// checkpoint saves it, and fills it in place.
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;
  /// Returns the tensors of the wrapped optimizer's state that are this rank's alone, which those
  /// of ReduceOp::Adasum are, as each rank steps by its own gradients; of the other kinds none. In
  /// a fixed order: a checkpoint saves them, and fills them in place.
  [[nodiscard]] std::vector<at::Tensor> state_of_rank() const;
  /// Returns the bytes of gradients that this rank has sent so far to other ranks, if each
  /// collective sends as few as it can: a measure that does not depend on where the ranks are.
  /// Sparse gradients are not counted.
  [[nodiscard]] std::uint64_t bytes_sent() const;
  /// A ParameterWriting is a guard: while it lives, parameters that a host has one copy of may be
  /// written, by one of its ranks.
  class [[nodiscard]] ParameterWriting {
   public:
    /// Begins the scope; write_parameters() does it.
    explicit ParameterWriting(DistributedOptimizer& optimizer);
    /// Collective with share_parameters: all ranks wait until it is written. Terminates nothing: an
    /// error is thrown by what comes next.
    ~ParameterWriting();
    ParameterWriting(const ParameterWriting&) = delete;
    ParameterWriting& operator=(const ParameterWriting&) = delete;
    /// Returns whether this rank is to write: with share_parameters one of each host, else all.
    [[nodiscard]] bool is_writer() const;

   private:
    std::weak_ptr<detail::OptimizerParts> parts_;  ///< of an optimizer that has not ended
  };
  /// Returns a guard for code that writes parameters between steps (weight clipping): `if (const
  /// auto writing = optimizer.write_parameters(); writing.is_writer()) ...`. With share_parameters
  /// it is collective, at its begin and at its end; without, nothing is sent and every rank writes.
  /// Throws Mismatch where parameters have been written outside of such a guard, or differ.
  ParameterWriting write_parameters() { return ParameterWriting(*this); }

  /// @private For hvd: the ranks that train together.
  [[nodiscard]] const ProcessSet& process_set() const;
  /// @private For hvd: the wrapped optimizer's state has been loaded, and is as it should be.
  void note_state();
  /// @private For hvd: the names of the parameters of each group, in the group's order, each
  /// parameter once.
  [[nodiscard]] std::vector<std::vector<std::string>> names_by_group();
  /// @private For hvd: the fp32 masters of the parameters; null without MasterWeights.
  [[nodiscard]] detail::MasterCopies* master_copies() const;
  /// @private For hvd, sharded: writes what save() writes on that rank alone, the only one that
  /// needs memory for it. Collective.
  void save_on(int rank, torch::serialize::OutputArchive& archive);
  /// @private For hvd: does what load() does with tensors that `reader` has not read yet.
  void load_unread(torch::serialize::InputArchive& archive, detail::CheckpointReader* reader);
  /// @private For hvd, sharded: returns what brings this rank's masters back to what they are now.
  [[nodiscard]] std::function<void()> remember_masters();
  /// Returns whether the state is shared out.
  [[nodiscard]] bool is_sharded() const;
  /// Returns whether each rank has its share of the gradients alone. False in a process set of one
  /// rank, also where the options ask for it.
  [[nodiscard]] bool shards_gradients() const;
  /// Returns this rank's shares of the gradients, with the names of their parameters, where
  /// `shards_gradients()`: after `synchronize()` and before `step()`; elements in the order of
  /// memory, to be changed in place. Local.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> gradient_shares();
  /// Returns whether there is one copy of the parameters per host. False in a process set of one
  /// rank, also where the options ask for it.
  [[nodiscard]] bool shares_parameters() const;

  /// Writes what the wrapped optimizer writes. Sharded it is collective, and writes what an
  /// optimizer that is not sharded would.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what the wrapped optimizer reads. Sharded it takes this rank's share of it, whatever the
  /// number of ranks that wrote it.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  [[nodiscard]] detail::OptimizerParts& parts() const;

  std::shared_ptr<detail::OptimizerParts> parts_;  ///< null after a move
};

}  // namespace hvd
#pragma GCC visibility pop
