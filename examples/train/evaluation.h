#pragma once
/// Room card: how good a model is on a test set that all ranks share out. Pure counting, and one sum over the ranks.

#include <torch/torch.h>

#include <cstdint>

#include "examples/data/batches.h"
#include "examples/models/models.h"

namespace examples {

/// Sums over images; tallies of disjoint sets of images add up.
struct Tally {
  double images = 0, loss = 0, top1 = 0, top5 = 0;

  Tally& operator+=(const Tally& other);
};

struct Evaluation {
  std::int64_t images = 0;
  double loss = 0;            ///< mean cross entropy
  double top1 = 0, top5 = 0;  ///< share of images whose label is the first, or among the first five
};

/// Of one batch: scores [items, classes], labels [items].
Tally score(const torch::Tensor& scores, const torch::Tensor& labels);

/// Which of `items` test images a rank takes: every ranks-th one. Together each once, whatever the number of ranks.
Indices share_of(std::size_t items, Shard shard);

/// What this rank's share of the test images adds up to. The model is left in the mode it was in.
Tally evaluate_share(Classifier& model, const Dataset& data, Shard shard, std::size_t batch_size, torch::Device device);

/// The sum over all ranks, in double precision, as means. Collective.
Evaluation sum_up(const Tally& share);

}  // namespace examples
