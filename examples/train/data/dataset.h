#pragma once
/// This header has labelled images as the trainer sees them, whatever file they came from. They are
/// plain values, used by one thread. An image set owns its bytes; nothing here talks to other
/// ranks. Reading fails by throwing DataError that names the file and what to do.

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

/// One split: whole in memory, the images as bytes, as they lie in the files; or a list of files
/// that are read when they are needed.
struct ImageSet {
  torch::Tensor images;  ///< uint8 [items, channels, height, width], contiguous, on the host
  torch::Tensor labels;  ///< int64 [items], each 0 … classes - 1
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
  std::vector<float> mean, deviation;  ///< per channel, of pixel values 0 … 1
  bool augment = false;                ///< training images are shifted and mirrored at random
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

/// CIFAR-10 from the official binary files: training images from whichever of data_batch_1.bin …
/// data_batch_5.bin exist, test images from test_batch.bin; a file may hold any number of whole
/// records of 3,073 bytes (label, then the red, green and blue plane of 32 x 32).
Dataset read_cifar10(const std::string& directory);

/// CIFAR-100 likewise: train.bin and test.bin; records of 3,074 bytes (coarse label, fine label,
/// planes). The fine labels are used.
Dataset read_cifar100(const std::string& directory);

/// MNIST from its idx files, each plain or with `.gz`: train-images-idx3-ubyte,
/// train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte.
Dataset read_mnist(const std::string& directory);

struct SyntheticOptions {
  std::int64_t train_images = 2500;
  std::int64_t test_images = 1000;
  std::int64_t side = 32;  ///< pixels
  float noise = 0.3F;  ///< deviation of the noise; a pattern's, in all colours together, is 0.42
  std::uint64_t seed = 0;
};

/// The embedded dataset: images made from a seed, bit for bit the same on every rank and in every
/// run, without a download. Ten classes of wave patterns, told apart by direction and wavelength.
/// The phase and the colour (whose sign inverts the pattern) are random, so an image and its
/// negative are equally likely in every class: all classes have the same mean image, and a linear
/// model on raw pixels, which would have to score a pattern and its negative both high, cannot be
/// right on more than about half of them. A model with one hidden layer can.
Dataset make_synthetic(const SyntheticOptions& options = {});

/// A folder of JPEG and PNG files, a folder per class in train/ and in val/. Lists the files;
/// images are read when batches are made.
Dataset open_image_folder(const std::string& directory, const ReaderOptions& options);

/// What is worth saying of the list: classes without images, files that are none. Empty if nothing
/// is.
std::string remarks(const Dataset& data);

/// Equal on ranks that have found the same files; for people, too.
std::string summary_of_files(const Dataset& data);

}  // namespace examples
