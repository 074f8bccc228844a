#pragma once
/// This function reads MNIST from its idx files, plain or gzipped. It owns nothing afterwards, and throws DataError that names the file,
/// what is wrong in it and the remedy.

#include <string>

#include "examples/train/data/dataset.h"

namespace examples {

/// train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, each also with `.gz`.
Dataset read_mnist(const std::string& directory);

}  // namespace examples
