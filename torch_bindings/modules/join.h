#pragma once
/// A JoinGuard is for training with different numbers of batches on each rank, in the sense of
/// PyTorch's Join: a guard around the training loop of all ranks. A rank that has no more batches
/// waits at the guard's end; until the last one is there its gradients count as zeros, and the
/// others train on. Then all have the model (parameters, buffers) of the rank that ended last.
///
///     { auto guard = ddp.join({.optimizer = &sgd}); for (auto& batch : batches) train(batch); }
///
/// The same goes for DistributedOptimizer: `auto guard = optimizer.join();`.
///
/// join() refuses, with InvalidArgument, a sharded optimizer, compressions with a memory (both need
/// every rank at each step), and a second guard of the same wrapper. So does a module's join() with
/// SyncBatchNorm layers; under an optimizer's, which knows no layers, their forward pass throws
/// Joined as soon as a rank has ended. So do sparse gradients; `sparse_as_dense` helps. Collectives
/// of the user's own behave as after hvd::join(): in an allreduce ranks that have ended count as
/// zeros, others throw Joined. What the user does after each step, a rank that has ended does less
/// often: the models become equal at the end, but an ExponentialMovingAverage does not, and
/// different rates of a scheduler that is stepped there are a Mismatch in the next step. It costs
/// an allreduce of one byte per rank at each reduction, and another before buffers are shared. It
/// belongs to the thread of the training loop, holds the wrapper's insides, and refers to the
/// optimizer that is given.
// Tested in tests/torch_bindings/what_if/what_if_uneven_test.cc

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>

#include "hvd/hvd.h"

namespace hvd {
class GradientReducer;
}  // namespace hvd
namespace hvd::detail {
class JoinRounds;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

/// JoinOptions are those of join() of both wrappers; equal on all ranks.
struct JoinOptions {
  /// True: gradients are divided by the number of all ranks, so that each batch counts the same.
  /// False: by the number of ranks that still have batches, as if there were no others. Ranks that
  /// accumulate gradients do so under no_sync() or with backward_passes_per_step: what has been
  /// reduced before is not reduced rightly a second time when a rank has ended.
  bool divide_by_initial_world_size = true;
  /// With DistributedDataParallel: the user's optimizer, whose state (momenta, step counters...)
  /// becomes that of the rank that ended last, too. Without it a rank that ended early keeps its
  /// own, and an optimizer with momenta would let the ranks drift apart afterwards.
  /// DistributedOptimizer shares its own.
  torch::optim::Optimizer* optimizer = nullptr;
};

namespace detail {
/// Throws InvalidArgument if `reducer` cannot do without a rank, or is in a guard already.
std::shared_ptr<JoinRounds> begin_rounds(GradientReducer& reducer, const JoinOptions& options);
}  // namespace detail

/// A JoinGuard is what join() returns.
class [[nodiscard]] JoinGuard {
 public:
  /// Parts are what a wrapper makes a guard of.
  struct Parts {
    std::shared_ptr<detail::JoinRounds> rounds;  ///< what the ranks tell one another
    std::function<void(int last)> share;         ///< collective: the model of rank `last` on all
    std::function<void()> end;                   ///< the wrapper goes on without a guard, anew
    World world = World::current();              ///< the wrapper's
  };
  /// Makes a guard without effect: that of a rank outside of the wrapper's process set.
  JoinGuard() = default;
  /// Begins the scope; join() of a wrapper does it.
  explicit JoinGuard(Parts parts);
  /// Does what end() does. Left by an exception, it makes the other ranks' next reduction (or the
  /// end of their guards) throw RankFailed, waits until they have got there, and throws nothing
  /// itself.
  ~JoinGuard() noexcept(false);
  JoinGuard(JoinGuard&& other) noexcept;  ///< leaves `other` without effect
  JoinGuard& operator=(JoinGuard&&) = delete;
  JoinGuard(const JoinGuard&) = delete;
  JoinGuard& operator=(const JoinGuard&) = delete;

  /// Blocks until all ranks have come to the end of theirs, and shares the model of the last.
  /// Collective. Does nothing a second time. Throws RankFailed, naming it, if a rank has left its
  /// guard by an exception; the models are then not shared.
  void end();

 private:
  void finish(bool failed);

  std::unique_ptr<Parts> parts_;
  int exceptions_ = 0;
};

}  // namespace hvd
#pragma GCC visibility pop
