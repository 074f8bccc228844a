#include "examples/train/data/dataset.h"

#include "examples/train/data/cifar.h"
#include "examples/train/data/mnist.h"
#include "examples/train/data/synthetic.h"

namespace examples {

const std::vector<std::string>& dataset_names() {
  static const std::vector<std::string> names = {"cifar10", "cifar100", "mnist", "synthetic"};
  return names;
}

Dataset load_dataset(const std::string& name, const std::string& directory, std::uint64_t seed) {
  if (name == "cifar10") return read_cifar10(directory);
  if (name == "cifar100") return read_cifar100(directory);
  if (name == "mnist") return read_mnist(directory);
  if (name == "synthetic") return make_synthetic({.seed = seed});
  throw DataError("there is no dataset '" + name + "'");
}

}  // namespace examples
