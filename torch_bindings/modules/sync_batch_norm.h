#pragma once
/// SyncBatchNorm is batch normalisation over the batches of all ranks together (Ioffe, Szegedy:
/// Batch normalization, 2015; across devices as in Peng et al.: MegDet, 2018). Forward gathers each
/// rank's mean, sum of squared deviations and count at once and combines them as Chan, Golub and
/// LeVeque do (Updating formulae and a pairwise algorithm for computing sample variances, 1979);
/// backward adds up two sums per channel at once, if any rank's input needs a gradient. One forward
/// or backward is made at a time. In training all ranks of the set must go through the same layers
/// in the same order, in backward too: a loss that does not use the output lets the others wait.

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A SyncBatchNorm stands in for BatchNorm1d, 2d and 3d, with their options, names and initial
/// values, so that their files load. Inputs: [N, C] to [N, C, D, H, W], of double, float, bf16 or
/// fp16, on the CPU or a GPU. N may differ between ranks and be 0. In a set of one rank, and in
/// evaluation, it is ordinary batch normalisation: evaluation never communicates. Gradients of
/// weight and bias are this rank's part of the sum, as other parameters' gradients are. What
/// backward adds up counts by the set_weight() that is in force then, of whichever optimizer or
/// module: two different ones are an InvalidArgument on all ranks, and so is a weight of 0 on a
/// rank with rows, unless all ranks say 0. Not differentiable twice.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// Makes a layer with weights of its own.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                             ProcessSet process_set = {});
  /// Makes a layer that shares the tensors of another one: a BatchNorm1dImpl, 2d or 3d.
  template <class Other>
  requires requires(Other other) { other.num_batches_tracked; }
  SyncBatchNormImpl(const Other& other, ProcessSet process_set)
      : options(other.options),
        weight(register_parameter("weight", other.weight,
                                  other.weight.defined() && other.weight.requires_grad())),
        bias(register_parameter("bias", other.bias,
                                other.bias.defined() && other.bias.requires_grad())),
        running_mean(register_buffer("running_mean", other.running_mean)),
        running_var(register_buffer("running_var", other.running_var)),
        num_batches_tracked(register_buffer("num_batches_tracked", other.num_batches_tracked)),
        process_set_(process_set) {
    train(other.is_training());
  }

  /// Makes all tensors anew, with their initial values.
  void reset() override;
  /// Gives the running statistics their initial values.
  void reset_running_stats();
  /// Gives weight, bias and running statistics their initial values.
  void reset_parameters();
  /// Prints the options.
  void pretty_print(std::ostream& stream) const override;

  /// Returns the normalised input. Collective in training (with `track_running_stats` also the
  /// running statistics change: those of the whole batch, its variance unbiased). Throws
  /// InvalidArgument for a wrong shape, on this rank; on all ranks if they have but one value per
  /// channel together; and what collectives throw.
  at::Tensor forward(const at::Tensor& input);

  /// Returns the ranks that normalise together.
  [[nodiscard]] const ProcessSet& process_set() const { return process_set_; }

  torch::nn::BatchNormOptions options;  ///< those of the constructor
  /// @{
  /// As in LibTorch's layer; undefined where the options say so.
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  /// @}

 private:
  ProcessSet process_set_;
};
/// SyncBatchNorm holds a SyncBatchNormImpl.
TORCH_MODULE(SyncBatchNorm);

namespace detail {
/// The layer as a function, in training. `momentum`: the share of this batch in the running
/// statistics, which may be undefined.
at::Tensor sync_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const at::Tensor& running_mean,
                           const at::Tensor& running_var, double momentum, double eps,
                           const ProcessSet& process_set);
void convert_sync_batchnorm(torch::nn::Module& module, const ProcessSet& process_set);
/// Returns whether the forward pass of `layer` is an operation of several ranks at present.
bool is_synchronizing(const torch::nn::Module& layer);
}  // namespace detail

/// Makes every BatchNorm1d, 2d and 3d in `module`, itself included, normalise over all ranks of the
/// set in training. Returns `module`; parameters, buffers and their names stay, so optimizers and
/// files stay valid.
/// - In Sequential, ModuleList and ModuleDict the layers are replaced by SyncBatchNorm.
/// - Everywhere else (a member `torch::nn::BatchNorm2d bn1` of the user's class, one in an
///   AnyModule, `module` itself), where C++ calls `forward` of the very type and no replacement
///   would be noticed, the layer stays what it is and is converted in place: from then on
///   `torch::batch_norm` in training sends the inputs of these layers, known by their tensors, the
///   way of SyncBatchNorm. So such a layer must keep its running statistics or, without any, its
///   parameters: `to(device)`, `to(dtype)`, torch::load are fine, but a `clone()` is not converted.
///   And LibTorch itself then still refuses, on that rank, a batch with one value per channel.
/// Throws InvalidArgument, naming the layer and changing nothing, for one of the second kind that
/// has neither parameters nor running statistics, as it could not be told from others, and for a
/// module that no shared_ptr owns. Warns of what has running statistics and is no BatchNorm of
/// LibTorch, TorchScript's layers among it: it stays as it is. To be asked with
/// sync_batchnorm_report().
template <class Module>
requires std::is_base_of_v<torch::nn::Module, Module> std::shared_ptr<Module>
convert_sync_batchnorm(std::shared_ptr<Module> module, const ProcessSet& process_set = {}) {
  detail::convert_sync_batchnorm(*module, process_set);
  return module;
}
/// Does the same for a holder.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> Holder
convert_sync_batchnorm(Holder module, const ProcessSet& process_set = {}) {
  detail::convert_sync_batchnorm(*module, process_set);
  return module;
}
/// Does the same for a module itself.
template <class Module>
requires std::is_base_of_v<torch::nn::Module, Module> Module& convert_sync_batchnorm(
    Module& module, const ProcessSet& process_set = {}) {
  detail::convert_sync_batchnorm(module, process_set);
  return module;
}

/// Returns whether `layer` is a SyncBatchNorm or a converted layer.
bool is_sync_batchnorm(const torch::nn::Module& layer);

/// A SyncBatchNormReport has the batch norms of a module, by their names in it.
struct SyncBatchNormReport {
  std::vector<std::string> synchronized;  ///< SyncBatchNorm, and layers that are converted in place
  /// BatchNorm that is not converted, and what keeps running statistics without being a BatchNorm
  /// or InstanceNorm of LibTorch: a layer of a TorchScript module, or of the user's own, that
  /// convert_sync_batchnorm() cannot convert.
  std::vector<std::string> local;
};
/// Returns what normalises over all ranks and what over this rank's batch alone; the module itself,
/// if it is one, is called by its type.
SyncBatchNormReport sync_batchnorm_report(const torch::nn::Module& module);
/// Does the same for a holder.
template <class Module>
SyncBatchNormReport sync_batchnorm_report(const torch::nn::ModuleHolder<Module>& module) {
  return sync_batchnorm_report(static_cast<const torch::nn::Module&>(*module));
}

}  // namespace hvd
#pragma GCC visibility pop
