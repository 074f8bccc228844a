#pragma once
/// This header has labelled images as the trainer sees them, whatever file they came from. They are plain values, used by one thread. An
/// image set owns its bytes; nothing here talks to other ranks. Reading fails by throwing DataError.

#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {

/// What is wrong with the data and how to put it right, in one sentence each.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One split, whole in memory: the images as bytes, as they lie in the files.
struct ImageSet {
  torch::Tensor images;  ///< uint8 [items, channels, height, width], contiguous, on the host
  torch::Tensor labels;  ///< int64 [items], each 0 … classes - 1

  std::int64_t size() const { return labels.defined() ? labels.size(0) : 0; }
};

struct Dataset {
  std::string name;
  int classes = 0;
  ImageSet train;
  ImageSet test;
  std::vector<float> mean, deviation;  ///< per channel, of pixel values 0 … 1
  bool augment = false;                ///< training images are shifted and mirrored at random

  std::vector<std::int64_t> image_shape() const { return train.images.sizes().slice(1).vec(); }
};

/// Reads or makes a dataset. `name` is one of dataset_names(). `directory` is where its files are (not used by synthetic), `seed` what
/// synthetic images are made from. Throws DataError.
Dataset load_dataset(const std::string& name, const std::string& directory, std::uint64_t seed);

const std::vector<std::string>& dataset_names();

}  // namespace examples
