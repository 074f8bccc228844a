#pragma once
/// Room card: a module whose gradients are averaged over the ranks by the end of `backward()`, as PyTorch's DistributedDataParallel does
/// (Li et al.: PyTorch distributed: experiences on accelerating data parallel training, 2020): the optimizer stays the user's own. The
/// engine is that of DistributedOptimizer: buckets leave while backward still runs.
/// Threads: forward and backward by one thread at a time; hooks run in autograd's threads. Owns the gradients' memory and shares the
/// module.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/parameters.h"

namespace hvd {

struct DistributedDataParallelOptions {
  /// For those who come from PyTorch; true and false do the same here. Which parameters got no gradient is known at the end of backward
  /// without a search: a parameter unused on this rank, but not on others, gets their average with zeros for this one; one unused
  /// everywhere stays without a gradient.
  bool find_unused_parameters = false;
  /// The first rank's buffers (running statistics...) on all, before each forward pass in training that takes part in a reduction.
  bool broadcast_buffers = true;
  Compression compression;
  /// Gradients are divided by it before the sum, and by size / it after.
  double gradient_predivide_factor = 1;
  /// Make sparse gradients dense before they are reduced.
  bool sparse_as_dense = false;
  ProcessSet process_set;
  /// See DistributedOptimizerOptions::gradients_are_views.
  bool gradients_are_views = true;
};

class GradientReducer;

namespace detail {

/// What is the same for every type of module.
class ModuleReducer : public std::enable_shared_from_this<ModuleReducer> {
 public:
  ModuleReducer(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options);
  ~ModuleReducer();
  ModuleReducer(const ModuleReducer&) = delete;
  ModuleReducer& operator=(const ModuleReducer&) = delete;

  void before_forward();
  /// Backward through `output` ends with a reduction.
  void after_forward(const at::Tensor& output);
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;

  int unsynchronized = 0;  ///< no_sync() guards alive

 private:
  void begin_backward();
  void end_backward();

  const std::shared_ptr<torch::nn::Module> module_;
  const DistributedDataParallelOptions options_;
  std::string name_;
  std::shared_ptr<GradientReducer> reducer_;
  std::atomic<bool> in_backward_{false};
};

/// Calls `visit` for each tensor in what a forward pass returns: a tensor, or optionals, containers, pairs, tuples and arrays of such.
template <class T, class Visit>
void for_each_tensor(const T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return;
  } else if constexpr (IsOptional<T>::value) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (Container<T>) {
    for (const auto& element : value) for_each_tensor(element, visit);
  } else {
    static_assert(TupleLike<T>, "forward() must return tensors, or std containers, optionals, pairs or tuples of tensors");
    std::apply([&visit](const auto&... elements) { (for_each_tensor(elements, visit), ...); }, value);
  }
}

}  // namespace detail

/// `Wrapped` (not Module, which the base class calls itself): any module with a `forward`. It is registered as "module", so parameters(),
/// train(), eval(), to() and save() of the wrapper mean the module's.
template <class Wrapped>
class DistributedDataParallel : public torch::nn::Module {
 public:
  /// Collective over the process set: the first rank's parameters and buffers become those of all. Parameters that require no gradient
  /// now are never reduced. Throws Mismatch if the ranks' modules differ; InvalidArgument, before anything is sent, if none does, or for a
  /// parameter that a DistributedOptimizer is around at present: its gradient would be reduced twice.
  explicit DistributedDataParallel(std::shared_ptr<Wrapped> module, DistributedDataParallelOptions options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module_(std::move(module)),
        reducer_(std::make_shared<detail::ModuleReducer>(module_, std::move(options))) {
    register_module("module", module_);
  }
  /// From a holder, such as torch::nn::Sequential.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DistributedDataParallel(const Holder& module, DistributedDataParallelOptions options = {})
      : DistributedDataParallel(module.ptr(), std::move(options)) {}

  /// The module's forward. When a backward pass through what it returns ends, all gradients of the module are the averages over the
  /// ranks; gradients from passes without synchronization are part of them. `backward()` is then collective: it throws Mismatch,
  /// RankFailed, Shutdown...
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    reducer_->before_forward();
    auto output = module_->forward(std::forward<Arguments>(arguments)...);
    if (reducer_->unsynchronized == 0)
      detail::for_each_tensor(output, [this](const at::Tensor& tensor) { reducer_->after_forward(tensor); });
    return output;
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// While the guard lives, forward passes are local: gradients of their backward passes add up on this rank, and the next pass outside
  /// the guard reduces the sum (gradient accumulation).
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<detail::ModuleReducer> reducer) : reducer_(std::move(reducer)) { ++reducer_->unsynchronized; }
    ~NoSync() {
      if (reducer_) --reducer_->unsynchronized;
    }
    NoSync(NoSync&& other) noexcept = default;  // so that it goes into a std::optional
    NoSync& operator=(NoSync&&) = delete;
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<detail::ModuleReducer> reducer_;
  };
  NoSync no_sync() { return NoSync(reducer_); }

  /// What this rank's compression remembers of what it has left out so far, as it is: for checkpoints (see CheckpointOptions::of_rank).
  /// Empty without a lossy compression.
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const { return reducer_->compression_memory(); }

  const std::shared_ptr<Wrapped>& module() const { return module_; }
  Wrapped* operator->() { return module_.get(); }

 private:
  std::shared_ptr<Wrapped> module_;
  std::shared_ptr<detail::ModuleReducer> reducer_;
};

template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(const Holder&,
                                                                                                 DistributedDataParallelOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace hvd
