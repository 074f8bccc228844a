#include "examples/train/data/dataset.h"

#include "examples/train/data/cifar.h"
#include "examples/train/data/image_folder.h"
#include "examples/train/data/mnist.h"
#include "examples/train/data/synthetic.h"

namespace examples {

const std::vector<std::string>& dataset_names() {
  static const std::vector<std::string> names = {"cifar10", "cifar100", "folder", "mnist", "synthetic"};
  return names;
}

Dataset load_dataset(const DatasetOptions& options) {
  if (options.name == "cifar10") return read_cifar10(options.directory);
  if (options.name == "cifar100") return read_cifar100(options.directory);
  if (options.name == "folder") return open_image_folder(options.directory, options.images);
  if (options.name == "mnist") return read_mnist(options.directory);
  if (options.name == "synthetic") return make_synthetic({.seed = options.seed});
  throw DataError("there is no dataset '" + options.name + "'");
}

}  // namespace examples
