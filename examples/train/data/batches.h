#pragma once
/// A plan says which images a rank trains on at which step; this header has it and the tensors made of them. It is for one thread; the plan
/// owns an order of indices, no images. Everything is a function of (seed, epoch, position): a run that was interrupted goes on exactly
/// where it stopped. It throws std::invalid_argument when there are too few images for the ranks.

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "examples/train/data/dataset.h"

namespace examples {

struct Shard {
  std::size_t rank = 0;
  std::size_t ranks = 1;
};

using Indices = std::vector<std::size_t>;

/// The order of an epoch is drawn once for all ranks (LibTorch's DistributedRandomSampler with one replica) and cut into steps of
/// ranks * accumulate * batch_size images; a micro-batch is cut further, rank by rank. So what p ranks with batch b see together at a step
/// is what one process with batch p * b sees. (The sampler with p replicas would cut the order per rank first: the same images per epoch,
/// other images per step; wrap_existing.cc shows that use.)
/// All ranks make equally many steps on equally many images: what does not fill a last step is left out, other images each epoch. When
/// there is not enough for even one step, the batch shrinks.
class BatchPlan {
 public:
  struct Options {
    std::size_t items = 0;
    std::size_t batch_size = 1;  ///< images per rank and backward pass
    std::size_t accumulate = 1;  ///< backward passes per step
    Shard shard;
    std::uint64_t seed = 0;
  };
  explicit BatchPlan(Options options);

  /// `position`: images of this epoch that were used already.
  void start_epoch(std::size_t epoch, std::size_t position = 0);
  /// This rank's micro-batches of the next step, `accumulate` of them; none when the epoch is over.
  std::vector<Indices> next();

  /// Whether next() would return none.
  bool over() const { return options_.items - position_ < images_per_step(); }

  std::size_t position() const { return position_; }
  std::size_t images_per_step() const { return options_.batch_size * options_.accumulate * options_.shard.ranks; }
  std::size_t steps_per_epoch() const { return options_.items / images_per_step(); }

 private:
  Options options_;
  torch::data::samplers::DistributedRandomSampler sampler_;
  std::size_t position_ = 0;
};

struct Batch {
  torch::Tensor images;         ///< float [items, channels, height, width], normalised
  torch::Tensor labels;         ///< int64 [items]
  std::vector<BadImage> bad{};  ///< files that could not be used
};

/// Images as they are.
Batch make_batch(const Dataset& data, const ImageSet& set, const Indices& indices);
/// Training images: where the dataset wants it, shifted by up to four pixels (zeros move in) and mirrored, at random by image and epoch.
Batch make_training_batch(const Dataset& data, const Indices& indices, std::uint64_t seed, std::size_t epoch);

}  // namespace examples
