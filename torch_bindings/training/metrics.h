#pragma once
/// This file measures how good a model is on data that the ranks share out, each sample counted
/// once. Sums are made in fp64, so that the result hardly depends on how many ranks there are. One
/// thread at a time uses it; functions marked collective are called by all ranks of the set. They
/// throw InvalidArgument at the call, and Mismatch where the ranks' names or shapes differ.
// Tested in tests/torch_bindings/collectives/session_test.cc,
// tests/torch_bindings/training/sampler_test.cc

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Returns which of `items` samples this rank evaluates: every size-th one, from its own rank on.
/// Together each once, whatever the number of ranks.
std::vector<std::size_t> evaluation_share(std::size_t items, const ProcessSet& process_set = {});
/// Returns the same for rank `rank` of `ranks`; without the library running.
std::vector<std::size_t> evaluation_share(std::size_t items, int rank, int ranks);

/// An Evaluation has means over samples.
struct Evaluation {
  std::int64_t samples = 0;  ///< how many there were
  double loss = 0;           ///< cross entropy
  /// @{
  /// Share of samples whose label is the first, or among the first five.
  double top1 = 0, top5 = 0;
  /// @}
};

/// An EvaluationTally has sums over samples; those of disjoint sets of samples add up.
struct EvaluationTally {
  /// @{
  /// Sum of what Evaluation has the mean of.
  double samples = 0, loss = 0, top1 = 0, top5 = 0;
  /// @}

  /// Adds one batch of a classifier: scores [samples, classes] as the last layer gives them, labels
  /// [samples] of int64. Equal scores rank in no particular order; with fewer than five classes
  /// every label is among the first five.
  EvaluationTally& add(const at::Tensor& scores, const at::Tensor& labels);
  /// Adds the sums of other samples.
  EvaluationTally& operator+=(const EvaluationTally& other);
  /// Returns the means over the samples of all ranks. Collective. A rank without samples takes part
  /// with an empty tally; no samples at all give zeros.
  [[nodiscard]] Evaluation average(const ProcessSet& process_set = {}) const;
};

/// Returns the means of all ranks' means, each counted as many times as that rank has samples.
/// Collective. All ranks give the same names; a rank without samples gives count 0, and its values
/// do not matter. Without any samples the means are zero.
std::map<std::string, double> average_metrics(const std::map<std::string, double>& means,
                                              double count, const ProcessSet& process_set = {});

/// Returns what all ranks predicted, in the order of the data set. Collective. `predictions` [n,
/// ...] of samples `indices` [n] (int64, 0 to items - 1) become [items, ...] on all ranks. A sample
/// that several ranks predicted, as samplers that pad make them, counts once: the lowest rank's.
/// Throws InvalidArgument, on all ranks, if an index is wrong or a sample is missing, naming it.
at::Tensor gather_predictions(const at::Tensor& predictions, const at::Tensor& indices,
                              std::int64_t items, const ProcessSet& process_set = {});

/// AveragedBuffers are a guard: while it lives, buffers of floating type are their means over the
/// ranks: batch norm's running statistics, of which each rank has those of its own batches, for
/// evaluating or saving one model. Then each rank has its own again, unless they are kept. Counters
/// are no statistics: buffers of integers and bool stay each rank's own, and so does every
/// `num_batches_tracked`, of which Module::to(torch::kDouble) makes a floating number. It is told
/// by its name; what else is floating is averaged.
class [[nodiscard]] AveragedBuffers {
 public:
  /// Averages the buffers of the module and all below it, in place. Collective; all ranks must have
  /// the same ones.
  explicit AveragedBuffers(const torch::nn::Module& module, const ProcessSet& process_set = {});
  /// Does the same for a holder.
  template <class Module>
  explicit AveragedBuffers(const torch::nn::ModuleHolder<Module>& module,
                           const ProcessSet& process_set = {})
      : AveragedBuffers(static_cast<const torch::nn::Module&>(*module), process_set) {}
  ~AveragedBuffers();
  AveragedBuffers(const AveragedBuffers&) = delete;
  AveragedBuffers& operator=(const AveragedBuffers&) = delete;
  /// Makes the means stay.
  void keep() { own_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  ///< a buffer, and what was in it
};

}  // namespace hvd
#pragma GCC visibility pop
