#pragma once
/// Room card: data parallel training within one process, without ranks: replicas of a module on CPU threads or on several GPUs, forward
/// and backward at the same time, gradients summed into the one module. On the CPU LibTorch's own data_parallel does not exist, and a
/// backward pass runs in one thread.
/// Threads: makes its own, joined before it returns. Owns the replicas until backward is done.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "hvd/errors.h"

namespace hvd {

struct DataParallelOptions {
  /// 0: as many as LibTorch has threads (at::get_num_threads()) for a module on the CPU; all GPUs for one on a GPU.
  int replicas = 0;
  /// Where each replica runs, the module's own device first; empty: threads of the CPU, or the first `replicas` GPUs.
  std::vector<at::Device> devices;
  /// Dimension of the input and of the output that counts the items.
  std::int64_t dim = 0;
};

namespace detail {
using Forward = std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>;
at::Tensor data_parallel(const std::shared_ptr<torch::nn::Module>& module, const Forward& forward, const at::Tensor& input,
                         const DataParallelOptions& options);
}  // namespace detail

/// `module->forward(input)`, cut along `dim` into one piece per replica, on the first device. Losses, gradients and hooks on parameters are
/// as if one forward had been made. Each replica normalises its own piece; running statistics are those of the first (as PyTorch's
/// DataParallel does). The module must be cloneable (torch::nn::Cloneable); without that, replicas on its own device share it, if it
/// has no buffers or evaluates, and InvalidArgument is thrown otherwise. Backward once per forward. An error of a replica is thrown here
/// or by `backward()`.
template <class Module>
at::Tensor data_parallel(const std::shared_ptr<Module>& module, const at::Tensor& input, const DataParallelOptions& options = {}) {
  const auto forward = [](torch::nn::Module& replica, const at::Tensor& piece) { return dynamic_cast<Module&>(replica).forward(piece); };
  return detail::data_parallel(module, forward, input, options);
}
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> at::Tensor data_parallel(const Holder& module,
                                                                                                  const at::Tensor& input,
                                                                                                  const DataParallelOptions& options = {}) {
  return data_parallel(module.ptr(), input, options);
}
template <class Module>
at::Tensor data_parallel(const Module& module, const at::Tensor& input, int replicas) {
  return data_parallel(module, input, DataParallelOptions{.replicas = replicas});
}

}  // namespace hvd
