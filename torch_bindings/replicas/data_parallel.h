#pragma once
/// This is data parallel training within one process, without ranks: replicas of a module on CPU
/// threads or on several GPUs, forward and backward at the same time, gradients summed into the one
/// module. On the CPU LibTorch's own data_parallel does not exist, and a backward pass runs in one
/// thread.
///
/// It makes threads of its own, joined before it returns. Several threads may call at once.
/// Replicas on the CPU share the number of LibTorch's threads that the caller has; it stays as it
/// was for the caller and for new threads, but for one that first asks for it in the moment in
/// which replicas start (LibTorch sets a thread's number and that of new threads together). It owns
/// the replicas until backward is done; DataParallel keeps them for the next call.
// Tested in tests/torch_bindings/replicas/data_parallel_structures_test.cc,
// tests/torch_bindings/training/training_helpers_test.cc

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "torch_bindings/collectives/tensor_structure.h"

namespace hvd::detail {
class ReplicaPool;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

/// DataParallelOptions are those of data_parallel and DataParallel.
struct DataParallelOptions {
  /// Number of replicas; 0: as many as LibTorch has threads (at::get_num_threads()) for a module on
  /// the CPU; all GPUs for one on a GPU.
  int replicas = 0;
  /// The devices that the replicas run on, the module's own first; empty: threads of the CPU, or
  /// the first `replicas` GPUs.
  std::vector<at::Device> devices = {};
  /// Dimension of the inputs and of the outputs that counts the items.
  std::int64_t dim = 0;
};

namespace detail {
/// Calls the replica of this number with these tensors as inputs, and keeps what it returns.
using Forward = std::function<void(torch::nn::Module& replica, std::size_t number,
                                   const std::vector<at::Tensor>& inputs)>;
/// Returns, when all replicas have been called, what they have returned: for each place the tensor
/// of each replica.
using Outputs = std::function<std::vector<std::vector<at::Tensor>>()>;
/// Returns a pool of replicas of one module that no forward pass uses at present. Any thread.
std::shared_ptr<ReplicaPool> make_replica_pool();
/// Returns the outputs, joined. `pool`: where replicas are taken from, and go to when their pass is
/// over; null: they are made, and end with it.
std::vector<at::Tensor> data_parallel(const std::shared_ptr<torch::nn::Module>& module,
                                      const Forward& forward, const Outputs& outputs,
                                      const std::vector<at::Tensor>& inputs,
                                      const DataParallelOptions& options,
                                      const std::shared_ptr<ReplicaPool>& pool = nullptr);

template <class Module, class... Inputs>
auto data_parallel_of(const std::shared_ptr<Module>& module, const std::tuple<Inputs...>& inputs,
                      const DataParallelOptions& options,
                      const std::shared_ptr<ReplicaPool>& pool = nullptr) {
  using Output = std::decay_t<decltype(module->forward(std::declval<const Inputs&>()...))>;
  std::vector<at::Tensor> given;  // each once
  std::unordered_map<const void*, std::size_t> places;
  visit_tensors(inputs, [&](const at::Tensor& tensor) {
    if (places.emplace(tensor.unsafeGetTensorImpl(), given.size()).second) given.push_back(tensor);
  });
  std::mutex mutex;  // replicas are called in threads of their own
  std::vector<std::optional<Output>> returned;
  const auto forward = [&](torch::nn::Module& replica, std::size_t number,
                           const std::vector<at::Tensor>& pieces) {
    auto own = inputs;
    visit_tensors(
        own, [&](at::Tensor& tensor) { tensor = pieces[places.at(tensor.unsafeGetTensorImpl())]; });
    const auto call = [&](const Inputs&... arguments) -> Output {
      return dynamic_cast<Module&>(replica).forward(arguments...);
    };
    Output output = std::apply(call, own);
    const std::lock_guard lock(mutex);
    returned.resize(std::max(returned.size(), number + 1));
    returned[number].emplace(std::move(output));
  };
  const auto outputs = [&] {
    std::vector<const Output*> all;
    for (const auto& output : returned) all.push_back(&*output);
    std::vector<std::vector<at::Tensor>> by_place;
    visit_together(
        all, [&](const std::vector<at::Tensor>& of_replicas) { by_place.push_back(of_replicas); });
    return by_place;
  };
  const std::vector<at::Tensor> joined =
      data_parallel(module, forward, outputs, given, options, pool);
  Output result = std::move(*returned.front());
  std::size_t place = 0;
  visit_tensors(result, [&](at::Tensor& tensor) { tensor = joined[place++]; });
  return result;
}
}  // namespace detail

/// Returns `module->forward(input)`, on the first device, with the input cut along `dim` into one
/// piece per replica. Losses, gradients and hooks on parameters are as if one forward had been
/// made. Each replica normalises its own piece; running statistics are those of the first (as
/// PyTorch's DataParallel does); InvalidArgument is thrown, on each rank with several replicas,
/// for a SyncBatchNorm that trains over several ranks. The module must be cloneable
/// (torch::nn::Cloneable); without that, replicas on its own device share it, if it has no buffers
/// or evaluates, and InvalidArgument is thrown otherwise. Backward once per forward. An error of a
/// replica is thrown here or by `backward()`.
///
/// A std::tuple has several inputs. Each input may be a tensor or made of tensors (std::vector,
/// optional, array, pair, tuple, map and torch::OrderedDict, one within another): all of them are
/// cut; tensors without dimensions and whatever else there is (numbers, strings, options) go to all
/// replicas. Throws InvalidArgument if the tensors fall into different numbers of pieces, or none
/// can be cut. What the module returns may be made of tensors likewise, which are joined along
/// `dim`; values without dimensions become a tensor of one dimension, with one of each replica (as
/// PyTorch's do; with one replica they stay). What is no tensor must be the same on all replicas,
/// and InvalidArgument is thrown otherwise.
template <class Module, class Input>
auto data_parallel(const std::shared_ptr<Module>& module, const Input& input,
                   const DataParallelOptions& options = {}) {
  return detail::data_parallel_of(module, std::tuple<Input>(input), options);
}
/// Does the same with several inputs.
template <class Module, class... Inputs>
auto data_parallel(const std::shared_ptr<Module>& module, const std::tuple<Inputs...>& inputs,
                   const DataParallelOptions& options = {}) {
  return detail::data_parallel_of(module, inputs, options);
}
/// Does the same for a holder, such as torch::nn::Sequential.
template <class Holder, class Input>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
auto data_parallel(const Holder& module, const Input& input,
                   const DataParallelOptions& options = {}) {
  return data_parallel(module.ptr(), input, options);
}
/// Does the same with so many replicas.
template <class Module, class Input>
auto data_parallel(const Module& module, const Input& input, int replicas) {
  return data_parallel(module, input, DataParallelOptions{.replicas = replicas});
}

/// DataParallel is data_parallel() of one module, again and again: replicas are kept between calls
/// instead of cloned for each. At each call they follow the module: values and types of parameters
/// and buffers, which parameters are trained, what trains and what evaluates, submodules put in or
/// replaced. A pass whose backward has not been made keeps its replicas to itself; what calls after
/// it, or at the same time in another thread, gets others. Only what is neither parameter, buffer
/// nor submodule cannot be seen from outside: plain members (a dropout's `options.p()`, a tensor
/// that is not registered) stay in replicas as they were when these were made. Call
/// `forget_replicas()` after changing such; data_parallel() clones each time and needs nothing.
template <class Wrapped>
class DataParallel {
 public:
  /// Shares the module; no replica is made yet.
  explicit DataParallel(std::shared_ptr<Wrapped> module, DataParallelOptions options = {})
      : module_(std::move(module)),
        options_(std::move(options)),
        pool_(detail::make_replica_pool()) {}
  /// Does the same from a holder, such as torch::nn::Sequential.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>
  explicit DataParallel(const Holder& module, DataParallelOptions options = {})
      : DataParallel(module.ptr(), std::move(options)) {}

  /// Returns what data_parallel() returns, for as many inputs as the module's forward() takes.
  template <class... Inputs>
  auto forward(const Inputs&... inputs) const {
    return detail::data_parallel_of(module_, std::tuple<std::decay_t<Inputs>...>(inputs...),
                                    options_, pool_);
  }
  /// Returns what forward() returns.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return forward(inputs...);
  }

  /// Has the next calls make new replicas. Requires that no other thread calls forward() meanwhile.
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
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DataParallel(
    const Holder&, DataParallelOptions = {})
->DataParallel<typename Holder::ContainedType>;

}  // namespace hvd
#pragma GCC visibility pop
