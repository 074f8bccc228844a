#pragma once
/// How good a model is on data that the ranks share out, each sample counted once. Sums are made in fp64, so that the result
/// hardly depends on how many ranks there are.
/// Thread: one at a time; functions marked collective are called by all ranks of the set. Errors: InvalidArgument at the call; Mismatch
/// where the ranks' names or shapes differ.

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

namespace hvd {

/// Which of `items` samples this rank evaluates: every size-th one, from its own rank on. Together each once, whatever the number of ranks.
std::vector<std::size_t> evaluation_share(std::size_t items, const ProcessSet& process_set = {});
/// The same for rank `rank` of `ranks`; without the library running.
std::vector<std::size_t> evaluation_share(std::size_t items, int rank, int ranks);

/// Means over samples.
struct Evaluation {
  std::int64_t samples = 0;
  double loss = 0;            ///< cross entropy
  double top1 = 0, top5 = 0;  ///< share of samples whose label is the first, or among the first five
};

/// Sums over samples; those of disjoint sets of samples add up.
struct EvaluationTally {
  double samples = 0, loss = 0, top1 = 0, top5 = 0;

  /// One batch of a classifier: scores [samples, classes] as the last layer gives them, labels [samples] of int64. Equal scores rank in no
  /// particular order; with fewer than five classes every label is among the first five.
  EvaluationTally& add(const at::Tensor& scores, const at::Tensor& labels);
  EvaluationTally& operator+=(const EvaluationTally& other);
  /// Collective: the means over the samples of all ranks. A rank without samples takes part with an empty tally; no samples at all give
  /// zeros.
  [[nodiscard]] Evaluation average(const ProcessSet& process_set = {}) const;
};

/// Collective: means of all ranks' means, each counted as many times as that rank has samples. All ranks give the same names; a rank
/// without samples gives count 0, and its values do not matter. Without any samples the means are zero.
std::map<std::string, double> average_metrics(const std::map<std::string, double>& means, double count, const ProcessSet& process_set = {});

/// Collective: what all ranks predicted, in the order of the data set: `predictions` [n, ...] of samples `indices` [n] (int64, 0 to
/// items - 1) become [items, ...] on all ranks. A sample that several ranks predicted, as samplers that pad make them, counts once: the
/// lowest rank's. Throws InvalidArgument, on all ranks, if an index is wrong or a sample is missing, naming it.
at::Tensor gather_predictions(const at::Tensor& predictions, const at::Tensor& indices, std::int64_t items,
                              const ProcessSet& process_set = {});

/// Collective: while it lives, buffers of floating type are their means over the ranks: batch norm's running statistics, of which each rank
/// has those of its own batches, for evaluating or saving one model. Then each rank has its own again, unless they are kept.
/// Counters are no statistics: buffers of integers and bool stay each rank's own, and so does every `num_batches_tracked`, of which
/// Module::to(torch::kDouble) makes a floating number. It is told by its name; what else is floating is averaged.
class [[nodiscard]] AveragedBuffers {
 public:
  /// Of the module and all below it, which must have the same ones on all ranks; changed in place.
  explicit AveragedBuffers(const torch::nn::Module& module, const ProcessSet& process_set = {});
  template <class Module>
  explicit AveragedBuffers(const torch::nn::ModuleHolder<Module>& module, const ProcessSet& process_set = {})
      : AveragedBuffers(static_cast<const torch::nn::Module&>(*module), process_set) {}
  ~AveragedBuffers();
  AveragedBuffers(const AveragedBuffers&) = delete;
  AveragedBuffers& operator=(const AveragedBuffers&) = delete;
  /// The means stay.
  void keep() { own_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  ///< a buffer, and what was in it
};

}  // namespace hvd
