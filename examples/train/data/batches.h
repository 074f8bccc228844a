#pragma once
/// These are batches of a dataset's images, and the data sets that LibTorch's data loaders make
/// them with: which images, and in which order, says the loader's sampler. Everything is a function
/// of the images' numbers, the seed and the epoch, so batches are the same

/// whoever makes them, a worker's thread or the caller's. The data sets refer to a Dataset, which
/// must outlive them; loaders copy them.

#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "examples/train/data/dataset.h"

namespace examples {

/// Images of a dataset, by number.
using Indices = torch::ArrayRef<std::size_t>;

/// data: float [items, channels, height, width], normalised; target: int64 [items].
struct Batch : torch::data::Example<> {
  std::vector<BadImage> bad{};  ///< files that could not be used
};

/// Images as they are.
Batch make_batch(const Dataset& data, const ImageSet& set, Indices indices);
/// Training images: where the dataset wants it, shifted by up to four pixels (zeros move in) and
/// mirrored, at random by image and epoch.
Batch make_training_batch(const Dataset& data, Indices indices, std::uint64_t seed,
                          std::size_t epoch);

/// The training images, as they are in the epoch that the sampler is at.
class TrainingImages : public torch::data::datasets::BatchDataset<TrainingImages, Batch> {
 public:
  TrainingImages(const Dataset& data, std::uint64_t seed, hvd::ElasticSampler sampler)
      : data_(data), seed_(seed), sampler_(std::move(sampler)) {}
  Batch get_batch(Indices indices) override {
    return make_training_batch(data_, indices, seed_, sampler_.epoch());
  }
  [[nodiscard]] std::optional<std::size_t> size() const override { return data_.train.size(); }

 private:
  const Dataset& data_;
  std::uint64_t seed_;
  hvd::ElasticSampler sampler_;  ///< shares its epoch with the loader's
};

/// The test images.
class TestImages : public torch::data::datasets::BatchDataset<TestImages, Batch> {
 public:
  explicit TestImages(const Dataset& data) : data_(data) {}
  Batch get_batch(Indices indices) override { return make_batch(data_, data_.test, indices); }
  [[nodiscard]] std::optional<std::size_t> size() const override { return data_.test.size(); }

 private:
  const Dataset& data_;
};

}  // namespace examples
