#pragma once
/// This header has labelled images as the trainer sees them, whatever file they came from. They are plain values, used by one thread. An
/// image set owns its bytes; nothing here talks to other ranks. Reading fails by throwing DataError.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/train/images/reader.h"

namespace examples {

/// What is wrong with the data and how to put it right, in one sentence each.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One split: whole in memory, the images as bytes, as they lie in the files; or a list of files that are read when they are needed.
struct ImageSet {
  torch::Tensor images;                      ///< uint8 [items, channels, height, width], contiguous, on the host
  torch::Tensor labels;                      ///< int64 [items], each 0 … classes - 1
  std::shared_ptr<const ImageFolder> files;  ///< null: the images are in memory

  std::int64_t size() const {
    if (files) return static_cast<std::int64_t>(files->size());
    return labels.defined() ? labels.size(0) : 0;
  }
};

struct Dataset {
  std::string name;
  int classes = 0;
  ImageSet train;
  ImageSet test;
  std::vector<float> mean, deviation;         ///< per channel, of pixel values 0 … 1
  bool augment = false;                       ///< training images are shifted and mirrored at random
  std::shared_ptr<const ImageReader> reader;  ///< of what is a list of files
  std::vector<std::string> class_names{};     ///< by label; empty where the dataset has no names

  std::vector<std::int64_t> image_shape() const {
    if (reader) return {3, reader->options().size, reader->options().size};
    return train.images.sizes().slice(1).vec();
  }
};

struct DatasetOptions {
  std::string name;        ///< one of dataset_names()
  std::string directory;   ///< where its files are; not used by synthetic
  std::uint64_t seed = 0;  ///< what synthetic images are made from
  ReaderOptions images{};  ///< of folder
};

/// Reads or makes a dataset; of a folder, the list of its files. Throws DataError.
Dataset load_dataset(const DatasetOptions& options);

const std::vector<std::string>& dataset_names();

}  // namespace examples
