#pragma once
/// The gradients of one optimizer on their way: it learns of each that backward gives, and reduces
/// what there is (torch_bindings/reducer/reducer_buckets.h). `.grad` is a view of the memory in
/// which it is reduced (torch_bindings/gradients/bucket_memory.h). `on_gradient` runs in autograd's
/// threads, several at once; the rest in the optimizer's. One mutex.
///
/// A round is one reduction of all buckets. Parameters that require no gradient hold no bucket up,
/// and count as zeros where another rank has a gradient. What `.grad` holds after a round is the
/// same on all ranks; a later round reduces what has come since, and no more. Each round's
/// submissions say which it is (torch_bindings/reducer/round_history.h): ranks that are in another
/// one get a Mismatch. A gradient that is on its way is marked
/// (torch_bindings/gradients/gradient_mark.h): if all of them have been thrown away when the next
/// one comes, or at `synchronize()`, the round is finished for the other ranks and forgotten; if
/// some have been changed, `synchronize()` throws InvalidArgument. Parameters that have got another
/// type, device or shape get other memory before the next round.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/gradients/gradient_memory.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/gradients/gradient_weights.h"
#include "torch_bindings/parameters/replica_guard.h"
#include "torch_bindings/reducer/distributed_options.h"
#include "torch_bindings/reducer/reducer_buckets.h"
#include "torch_bindings/reducer/round_history.h"

namespace hvd {

namespace detail {
class JoinRounds;
class StepWatch;
}  // namespace detail

/// The reducer of the gradients of some parameters: of an optimizer, or of a module.
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  using Named = NamedParameter;
  using Taking = ReducerBuckets::Taking;
  /// The observers of each gradient that backward gives, called in autograd's threads.
  struct Observers {
    /// Says whether a gradient is to be taken in; those that it does not want are found by
    /// `synchronize()`. Null: all are wanted.
    std::function<bool(const Named&)> wants;
    /// The watch that is told of it: where it knows that the optimizer was stepped by itself the
    /// pass is refused. May be null.
    std::shared_ptr<detail::StepWatch> witness;
  };
  /// `number` tells the optimizers of a process apart, equally on all ranks; `kind` what else has
  /// gradients reduced; `part` what one of them has several of.
  GradientReducer(const std::vector<Named>& parameters, DistributedOptimizerOptions options,
                  int number, const std::string& kind = "optimizer",
                  Taking taking = Taking::ByDevice, const std::string& part = "");

  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Puts the hooks on the parameters, which keep this alive only as long as somebody else does;
  /// `unhook` takes them off. A user's own hook on a parameter goes on being called.
  void hook(Observers observers = {});
  void unhook();
  /// Puts hooks back that a user's own have taken the place of. Not while backward runs.
  void hook_again();
  /// Sets whether gradients are taken in as backward gives them. Those that came meanwhile are
  /// found by `synchronize()`.
  void listen(bool on);
  /// Hands this rank's share of what is reduced there, from now on, and leaves `.grad` undefined;
  /// null: it stays. Between two rounds.
  void keep_shares(GradientKeeper* keeper);
  /// While it is set, ranks may have joined: each round ends with one of it
  /// (torch_bindings/modules/join.h).
  void set_join(std::shared_ptr<detail::JoinRounds> join);
  [[nodiscard]] const std::shared_ptr<detail::JoinRounds>& join_rounds() const { return join_; }

  /// Reduces what is not reduced yet: nothing if a finished call did that already and nothing has
  /// come since (a gradient that a user has put in place of one that was reduced counts as new).
  void synchronize();
  [[nodiscard]] bool is_synchronized() const;
  /// Begins a round in which gradients have weights, if none has begun: ranks that wait in backward
  /// for the sum of the weights need this one's, whatever it waits for.
  void tell_weight();
  /// Reduces whatever there is, for those who call it at the end of each backward pass. One that
  /// `has_thrown` leaves `.grad` as it has become, with zeros where it was changed on its way, and
  /// is a Mismatch where other ranks' has not thrown, unless all has left already: then the next
  /// pass is.
  void finish_pass(bool has_thrown = false);
  /// Begins the evaluation of a closure: `synchronize()` reduces after it, whatever came before.
  void begin_evaluation();
  /// Waits for what is under way and forgets what has gathered, before gradients are thrown away.
  void settle();
  /// Ends a step: what comes next is new.
  void begin_step();
  void set_passes(int passes);
  /// Sets how much this rank's gradients count in averages until the next step: sum(w * g) / sum(w)
  /// over the ranks; none: as much as the others'. All ranks must have one, or none (else Mismatch
  /// on all of them, in the round). Throws InvalidArgument once backward has begun.
  void set_weight(std::optional<double> weight);
  [[nodiscard]] std::optional<double> weight() const;
  /// Returns whether backward has given something since the last round, or a round has begun.
  [[nodiscard]] bool has_begun() const;
  /// Collective. Returns the loss of all ranks together, as their gradients are. With a `refusal`
  /// on any rank all throw Mismatch, with its words.
  [[nodiscard]] at::Tensor reduce_loss(const at::Tensor& loss,
                                       const std::string& refusal = {}) const;
  /// Returns what compresses gradients by a compression that needs a memory; null without one.
  [[nodiscard]] const GradientCompressor* compressor() const { return buckets_.compressor(); }
  [[nodiscard]] std::uint64_t bytes_sent() const;
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const ProcessSet& process_set() const { return options_.process_set; }
  /// Returns whether one of the parameters requires a gradient now.
  [[nodiscard]] bool requires_gradients() const;
  /// Returns the parameters whose gradients it reduces, each once, with their names.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> parameters() const;
  /// Returns the parameters whose gradients travel together.
  [[nodiscard]] std::vector<std::vector<at::Tensor>> parameters_by_bucket() const {
    return buckets_.parameters();
  }
  /// Has the next round also compare this between the ranks: what differs is a Mismatch on all of
  /// them. Costs an empty tensor. Call it where all ranks are between two rounds. `said`: of this
  /// rank, where there is a difference; none: that parameters or groups have changed.
  void announce(Shape layout, std::string said = {});
  /// Collective. Compares it at once, in a round of its own that leaves all gradients as they are.
  /// A rank that calls it alone gets the Mismatch together with the others, when these make their
  /// next round. Call it after a round that is complete.
  void compare(Shape layout, std::string said = {});
  /// Has each round compare these, too, between the ranks from now on
  /// (torch_bindings/parameters/replica_guard.h).
  void watch(ReplicaComparer::Terms terms);
  /// Collective. Compares what each round compares slice by slice, all of it at once. Throws
  /// Mismatch, on all ranks, where it differs.
  void check_replicas();

 private:
  struct Outcome;
  Outcome synchronize_gradients();
  [[nodiscard]] bool has_joined();
  void put_hook(std::size_t slot);
  void reduce_until_none_is_late();
  void on_gradient(std::size_t slot);
  [[noreturn]] void refuse(const std::string& text);
  void before_gradient(std::size_t slot);
  void refuse_more(const GradientSlot& slot);
  void begin_pass(const GradientSlot& first);
  void refuse_with_shares(const GradientSlot& slot);

  detail::HostMemoryUser uses_host_memory_;  // outlives all that has some
  mutable std::mutex mutex_;
  const DistributedOptimizerOptions options_;
  detail::GradientOwner owner_;
  const std::string name_;  ///< "optimizer.0"
  int passes_per_step_;
  GradientWeights weights_;  ///< see set_weight
  RoundHistory history_;
  ReplicaComparer replicas_;
  ReducerBuckets buckets_;
  Observers observers_;
  std::shared_ptr<detail::JoinRounds> join_;
  double join_factor_ = 1;   ///< what the last round has multiplied averages by
  std::uint64_t joins_ = 0;  ///< of all ranks, that have ended
  bool hooked_ = false;
  bool listening_ = true;
  bool synchronized_ = false;
  bool shares_kept_ = false;  ///< who keeps shares has gradients of a whole round
  int last_pass_ = -1;        ///< the backward pass that the last gradient came from
};

/// Throws what `GradientReducer::set_weight` would.
void refuse_late_weight(const GradientReducer& reducer);

}  // namespace hvd
