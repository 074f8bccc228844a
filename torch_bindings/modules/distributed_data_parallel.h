#pragma once
/// A DistributedDataParallel is a module whose gradients are averaged over the ranks by the end of
/// `backward()`, as PyTorch's DistributedDataParallel does (Li et al.: PyTorch distributed:
/// experiences on accelerating data parallel training, 2020): the optimizer stays the user's own.
/// The engine is that of DistributedOptimizer: buckets leave while backward still runs. It does not
/// matter whether a loss comes from what `forward` returns or from tensors that the module keeps.
///
/// Evaluation sends nothing after a step whose backward pass was reduced: all ranks then have the
/// first one's buffers. After a forward pass in training whose backward pass is still to come the
/// next one in evaluation shares them, so all ranks must make it. What forward passes in training
/// under no_sync() or NoGradGuard make of the buffers stays each rank's own until the next one that
/// is reduced.
///
/// A reduction begins where a pass gives a parameter a gradient, or in training where backward()
/// comes from what `forward` has returned: torch::autograd::grad with respect to an input sends
/// nothing, and one rank alone may ask for it. With respect to parameters it gives this rank's own
/// gradients, which is logged once unless create_graph is set.
///
/// What passes under no_sync(), and those of the module itself past the wrapper's `forward`, make
/// of gradients stays on the rank until the next pass that is reduced. If parameters have changed
/// meanwhile, the ranks compare them in that pass: steps by gradients of one rank's own are a
/// Mismatch on all. A module that is trained past its wrapper is told so: by a line in the log at
/// the first gradient, and by InvalidArgument in backward once it has been stepped by such
/// gradients.
///
/// Parameters that the module gets later (another head) are reduced from the next forward pass in
/// training on. All ranks must have them, with the same values: call broadcast_parameters() after
/// the change. What is unlike is a Mismatch on all ranks in the next backward pass.
///
/// Optimizers that decide by the loss (LBFGS) need that of all ranks: let the closure return
/// `hvd::allreduce(loss.detach())`, or use a DistributedOptimizer, which does so.
///
/// If a forward pass throws on one rank, the others wait in their backward pass for this rank's
/// next one. A rank that catches the exception takes part in one step less: it must make up for it
/// (or use join()), or the others wait for it at the end.
///
/// If a backward pass throws, its gradients count nowhere, and `.grad` stays as it has become. The
/// other ranks, whose own has not thrown, get a Mismatch when this one begins its next forward
/// pass, or calls set_weight() or join(): in the pass that met the failed one, or, if all gradients
/// of that had left already, in the next one (then this rank, too). All may call zero_grad() and
/// repeat the batch; where others have stepped before they got it, broadcast_parameters() first.
///
/// A backward pass that throws before it has reached what `forward` returned (in the loss) is like
/// a forward pass that throws; with buffers this rank then waits for the others at the end. Where
/// one goes through several wrappers and throws before it has reached all of them, repeating it
/// does not make the ranks meet again.
///
/// Requires that one thread at a time calls forward and backward; hooks run in autograd's threads.
/// Owns the gradients' memory and shares the module.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/tensor_structure.h"
#include "torch_bindings/modules/join.h"
#include "torch_bindings/optimizer/parameters.h"
#include "torch_bindings/sharding/shared_buffers.h"

namespace hvd {
class GradientReducer;
class ReplicaComparer;
}  // namespace hvd

#pragma GCC visibility push(default)
namespace hvd {

/// DistributedDataParallelOptions are those of a DistributedDataParallel; equal on all ranks.
struct DistributedDataParallelOptions {
  /// An option for those who come from PyTorch: true and false do the same here. Which parameters
  /// got no gradient is known at the end of backward without a search: a parameter unused on this
  /// rank, but not on others, gets their average with zeros for this one; one unused everywhere
  /// stays without a gradient.
  bool find_unused_parameters = false;
  /// True: all ranks get the first rank's buffers (running statistics...), before each forward pass
  /// in training that takes part in a reduction, and when its backward pass ends, while gradients
  /// are still under way. So ranks agree in evaluation, and one rank may evaluate alone. Buffers of
  /// 64 KiB and more (masks, rotary tables) travel only where some rank has changed them, as
  /// version counters tell: write to them by operations, not through a pointer or `data()`. Running
  /// statistics always do.
  bool broadcast_buffers = true;
  Compression compression{};  ///< how gradients travel
  /// Divides gradients before the sum; size / it divides them after.
  double gradient_predivide_factor = 1;
  /// True: sparse gradients are made dense before they are reduced.
  bool sparse_as_dense = false;
  ProcessSet process_set{};  ///< the ranks that train together
  /// See DistributedOptimizerOptions::gradients_are_views.
  bool gradients_are_views = true;
};

namespace detail {

class GradientOwner;
class LocalGradients;

/// The part of a DistributedDataParallel that is the same for every type of module. A backward pass
/// is reduced if it goes through what a synchronized forward pass has returned, or if it gives a
/// parameter a gradient while such a forward pass has not had its backward pass yet (its loss may
/// come from tensors that the module keeps).
class ModuleReducer : public std::enable_shared_from_this<ModuleReducer> {
 public:
  ModuleReducer(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options);
  ~ModuleReducer();
  ModuleReducer(const ModuleReducer&) = delete;
  ModuleReducer& operator=(const ModuleReducer&) = delete;

  /// One forward pass. Marks what it returns; ends without `done()` if the module throws.
  class Pass {
   public:
    explicit Pass(ModuleReducer& reducer);
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    /// Backward through `output` ends with a reduction, or is local.
    void mark(const at::Tensor& output);
    void done();

   private:
    ModuleReducer& reducer_;
    const bool synchronized_, training_;
    bool marked_ = false, done_ = false;
    std::uint64_t number_ = 0;
  };

  [[nodiscard]] JoinGuard join(const JoinOptions& options);
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;
  void set_weight(double n);

  int unsynchronized = 0;  ///< no_sync() guards alive

 private:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  void before_forward(bool synchronized);
  void share_buffers(bool synchronized);
  void announce_changes();
  void take_in_new();
  [[nodiscard]] Named take_unfrozen();
  void reduce_unfrozen(const Named& unfrozen);
  void add_reducer(const Named& parameters, int number);
  void on_output(std::uint64_t pass, bool synchronized, bool training);
  void tell_of_asked();
  bool takes_gradient(const std::string& name, const at::Tensor& parameter);
  void keep_local(const std::string& name, const at::Tensor& parameter, int task);
  [[nodiscard]] std::string name() const;
  void begin_backward(int task);
  bool end_failed_backward();
  void end_backward(bool has_thrown);
  void compare_kept_buffers();
  void finish_pass(std::size_t reducer, bool has_thrown);
  void share_model(int last, torch::optim::Optimizer* optimizer);
  void end_join();
  void begin_anew();

  const std::shared_ptr<torch::nn::Module> module_;
  const World world_ = World::current();
  const DistributedDataParallelOptions options_;
  const int number_;
  SharedBuffers buffers_;
  const std::unique_ptr<ReplicaComparer> kept_;  ///< compares the buffers that do not travel
  Named frozen_;                                 ///< parameters that require no gradient so far
  Named unfrozen_;  ///< those that have no reducer before this backward pass ends
  std::unordered_set<const void*> known_;  ///< all parameters: those of reducers and frozen ones
  /// The first from the start, one more for each set of parameters that were unfrozen later; none
  /// on a rank outside of the process set.
  std::vector<std::shared_ptr<GradientReducer>> reducers_;
  std::unique_ptr<GradientOwner> alone_;  ///< of what such a rank trains; null elsewhere
  std::size_t agreed_ = 1;                ///< reducers that all ranks are known to have
  std::shared_ptr<JoinRounds> rounds_;    ///< null outside join()
  std::uint64_t joins_ = 0;               ///< of all ranks, that have ended
  bool are_buffers_own_ =
      false;  ///< a forward pass in training may have changed them since they were shared
  bool are_buffers_ahead_ = false;  ///< shared for a forward pass that has thrown
  std::uint64_t passes_ = 0;

  std::mutex mutex_;                     // the rest is of autograd's threads, too
  std::set<std::uint64_t> outstanding_;  ///< synchronized forward passes without their backward
  int spent_ = 0;  ///< so many of the oldest have had it; the next forward pass forgets them
  std::set<std::uint64_t> reached_;  ///< by this backward pass, through what they returned
  bool in_backward_ = false;
  bool keeps_graph_ = false;
  std::weak_ptr<void> running_;  ///< ends with the backward pass being reduced, also by a throw
  int task_ = -1;                ///< its number
  int local_task_ = -1;       ///< the last one through what a forward pass under no_sync() returned
  int reached_task_ = -1;     ///< the last one through what another forward pass returned
  int last_local_task_ = -1;  ///< the last one that has left gradients on this rank
  std::unique_ptr<LocalGradients> local_;  ///< null if there are none to be reduced yet
  bool told_ = false;                      ///< that some gradients are not reduced
};

}  // namespace detail

/// A DistributedDataParallel wraps a module of type `Wrapped` (not Module, which the base class
/// calls itself): any with a `forward`. It is registered as "module", so parameters(), train(),
/// eval(), to() and save() of the wrapper mean the module's.
template <class Wrapped>
class DistributedDataParallel : public torch::nn::Module {
 public:
  /// Makes the first rank's parameters and buffers those of all. Collective over the process set; a
  /// rank outside of it trains by itself, as the module alone does. Parameters that require no
  /// gradient now are reduced from the first forward pass on in which they do, on all ranks the
  /// same one (else Mismatch on all, in the next backward pass); if a DistributedOptimizer is
  /// around one by then, it is left to that. Throws Mismatch if the ranks' modules differ;
  /// InvalidArgument, before anything is sent, if none does, or for a parameter that a
  /// DistributedOptimizer is around at present: its gradient would be reduced twice.
  explicit DistributedDataParallel(std::shared_ptr<Wrapped> module,
                                   DistributedDataParallelOptions options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module_(std::move(module)),
        reducer_(std::make_shared<detail::ModuleReducer>(module_, std::move(options))) {
    register_module("module", module_);
  }
  /// Does the same from a holder, such as torch::nn::Sequential.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DistributedDataParallel(const Holder& module,
                                   DistributedDataParallelOptions options = {})
      : DistributedDataParallel(module.ptr(), std::move(options)) {}

  /// Returns what the module's forward returns. When the backward pass from it ends, all gradients
  /// of the module are the averages over the ranks; gradients from passes without synchronization
  /// are part of them. `backward()` is then collective: it throws Mismatch, RankFailed, Shutdown...
  /// Several forward passes may have one backward pass, or one each.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    detail::ModuleReducer::Pass pass(*reducer());
    if constexpr (std::is_void_v<decltype(module_->forward(
                      std::forward<Arguments>(arguments)...))>) {
      module_->forward(std::forward<Arguments>(arguments)...);
      pass.done();
    } else {
      auto output = module_->forward(std::forward<Arguments>(arguments)...);
      // a backward pass from what holds none is known by the first gradient that it gives
      detail::visit_tensors(output, [&pass](const at::Tensor& tensor) { pass.mark(tensor); });
      pass.done();
      return output;
    }
  }
  /// Returns what forward() returns.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// A NoSync is a guard: while it lives, forward passes are local. Gradients of their backward
  /// passes add up on this rank, and the next pass outside the guard reduces the sum (gradient
  /// accumulation).
  class [[nodiscard]] NoSync {
   public:
    /// Begins the scope; no_sync() does it.
    explicit NoSync(std::shared_ptr<detail::ModuleReducer> reducer) : reducer_(std::move(reducer)) {
      ++reducer_->unsynchronized;
    }
    ~NoSync() {
      if (reducer_) --reducer_->unsynchronized;
    }
    NoSync(NoSync&& other) noexcept = default;  ///< so that it goes into a std::optional
    NoSync& operator=(NoSync&&) = delete;
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<detail::ModuleReducer> reducer_;
  };
  /// Returns a guard for passes that are not reduced.
  NoSync no_sync() { return NoSync(reducer()); }

  /// Returns a guard for ranks with different numbers of batches (torch_bindings/modules/join.h),
  /// around the training loop, on all ranks of the set. What some have unfrozen meanwhile all must
  /// have before the next pass, else that throws Mismatch.
  JoinGuard join(const JoinOptions& options = {}) { return reducer()->join(options); }

  /// Says what this rank's gradients count in the next backward pass that is reduced: the average
  /// becomes sum(n * g) / sum(n), as DistributedOptimizer::set_weight() says. Call it on all ranks,
  /// before that pass; with no_sync() for all rows since the last reduction.
  void set_weight(double n) { reducer()->set_weight(n); }

  /// Returns what this rank's compression remembers of what it has left out, as it is: for
  /// checkpoints (see CheckpointOptions::of_rank). Empty without a lossy compression.
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const {
    return reducer()->compression_memory();
  }

  /// Returns the module that is wrapped.
  const std::shared_ptr<Wrapped>& module() const { return module_; }
  /// @{
  /// Returns this wrapper, so that it is used as holders are: `ddp->forward(x)` is reduced as
  /// `ddp.forward(x)` is, `ddp->parameters()` are the module's. What only the wrapped module has is
  /// in `ddp.module()`.
  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }
  /// @}

 private:
  [[nodiscard]] const std::shared_ptr<detail::ModuleReducer>& reducer() const {
    if (!reducer_) throw InvalidArgument("this DistributedDataParallel has been moved from");
    return reducer_;
  }

  std::shared_ptr<Wrapped> module_;
  std::shared_ptr<detail::ModuleReducer> reducer_;
};

/// Lets `DistributedDataParallel(holder)` find the type of the module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(
    const Holder&, DistributedDataParallelOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace hvd
#pragma GCC visibility pop
