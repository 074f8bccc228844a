#pragma once
/// This is data parallel training within one process, without ranks: replicas of a module on CPU threads or on several GPUs, forward and
/// backward at the same time, gradients summed into the one module. On the CPU LibTorch's own data_parallel does not exist, and a backward
/// pass runs in one thread.
///
/// It makes threads of its own, joined before it returns. Several threads may call at once. Replicas on the CPU share the number of
/// LibTorch's threads that the caller has; it stays as it was for the caller and for new threads, but for one that first asks for it in the
/// moment in which replicas start (LibTorch sets a thread's number and that of new threads together). It owns the replicas until backward
/// is done; DataParallel keeps them for the next call.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/errors.h"

namespace hvd::detail {
class ReplicaPool;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

/// DataParallelOptions are those of data_parallel and DataParallel.
struct DataParallelOptions {
  /// Number of replicas; 0: as many as LibTorch has threads (at::get_num_threads()) for a module on the CPU; all GPUs for one on a GPU.
  int replicas = 0;
  /// Where each replica runs, the module's own device first; empty: threads of the CPU, or the first `replicas` GPUs.
  std::vector<at::Device> devices;
  /// Dimension of the input and of the output that counts the items.
  std::int64_t dim = 0;
};

namespace detail {
using Forward = std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>;
/// Returns a pool of replicas of one module that no forward pass uses at present. Any thread.
std::shared_ptr<ReplicaPool> make_replica_pool();
/// `pool`: where replicas are taken from, and go to when their pass is over; null: they are made, and end with it.
at::Tensor data_parallel(const std::shared_ptr<torch::nn::Module>& module, const Forward& forward, const at::Tensor& input,
                         const DataParallelOptions& options, const std::shared_ptr<ReplicaPool>& pool = nullptr);
template <class Module>
at::Tensor data_parallel_of(const std::shared_ptr<Module>& module, const at::Tensor& input, const DataParallelOptions& options,
                            const std::shared_ptr<ReplicaPool>& pool = nullptr) {
  const auto forward = [](torch::nn::Module& replica, const at::Tensor& piece) { return dynamic_cast<Module&>(replica).forward(piece); };
  return data_parallel(module, forward, input, options, pool);
}
}  // namespace detail

/// Returns `module->forward(input)`, on the first device, with the input cut along `dim` into one piece per replica. Losses, gradients and
/// hooks on parameters are as if one forward had been made. Each replica normalises its own piece; running statistics are those of the
/// first (as PyTorch's DataParallel does). The module must be cloneable (torch::nn::Cloneable); without that, replicas on its own device
/// share it, if it has no buffers or evaluates, and InvalidArgument is thrown otherwise. Backward once per forward. An error of a replica
/// is thrown here or by `backward()`.
template <class Module>
at::Tensor data_parallel(const std::shared_ptr<Module>& module, const at::Tensor& input, const DataParallelOptions& options = {}) {
  return detail::data_parallel_of(module, input, options);
}
/// Does the same for a holder, such as torch::nn::Sequential.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> at::Tensor data_parallel(const Holder& module,
                                                                                                  const at::Tensor& input,
                                                                                                  const DataParallelOptions& options = {}) {
  return data_parallel(module.ptr(), input, options);
}
/// Does the same with so many replicas.
template <class Module>
at::Tensor data_parallel(const Module& module, const at::Tensor& input, int replicas) {
  return data_parallel(module, input, DataParallelOptions{.replicas = replicas});
}

/// DataParallel is data_parallel() of one module, again and again: replicas are kept between calls instead of cloned for each. At each call
/// they follow the module: values and types of parameters and buffers, which parameters are trained, what trains and what evaluates,
/// submodules put in or replaced. A pass whose backward has not been made keeps its replicas to itself; what calls after it, or at the same
/// time in another thread, gets others. Only what is neither parameter, buffer nor submodule cannot be seen from outside: plain members (a
/// dropout's `options.p()`, a tensor that is not registered) stay in replicas as they were when these were made. Call `forget_replicas()`
/// after changing such; data_parallel() clones each time and needs nothing.
template <class Wrapped>
class DataParallel {
 public:
  /// Shares the module; no replica is made yet.
  explicit DataParallel(std::shared_ptr<Wrapped> module, DataParallelOptions options = {})
      : module_(std::move(module)), options_(std::move(options)), pool_(detail::make_replica_pool()) {}
  /// Does the same from a holder, such as torch::nn::Sequential.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DataParallel(const Holder& module, DataParallelOptions options = {}) : DataParallel(module.ptr(), std::move(options)) {}

  /// Returns what data_parallel() returns.
  at::Tensor forward(const at::Tensor& input) const { return detail::data_parallel_of(module_, input, options_, pool_); }
  /// Returns what forward() returns.
  at::Tensor operator()(const at::Tensor& input) const { return forward(input); }

  /// Makes the next calls make new replicas. Requires that no other thread calls forward() meanwhile.
  void forget_replicas() { pool_ = detail::make_replica_pool(); }
  /// Returns the module that is trained.
  const std::shared_ptr<Wrapped>& module() const { return module_; }

 private:
  std::shared_ptr<Wrapped> module_;
  DataParallelOptions options_;
  std::shared_ptr<detail::ReplicaPool> pool_;
};

/// Lets `DataParallel(holder)` find the type of the module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(const Holder&, DataParallelOptions = {})
->DataParallel<typename Holder::ContainedType>;

}  // namespace hvd
#pragma GCC visibility pop
