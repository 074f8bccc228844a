#pragma once
/// These functions read CIFAR-10 and CIFAR-100 from the official binary files. They own nothing afterwards, and throw DataError that names
/// the file, the record and the remedy.

#include <string>

#include "examples/train/data/dataset.h"

namespace examples {

/// Training images from whichever of data_batch_1.bin … data_batch_5.bin exist, test images from test_batch.bin; a file may hold any
/// number of whole records of 3,073 bytes (label, then the red, green and blue plane of 32 x 32).
Dataset read_cifar10(const std::string& directory);

/// train.bin and test.bin; records of 3,074 bytes (coarse label, fine label, planes). The fine labels are used.
Dataset read_cifar100(const std::string& directory);

}  // namespace examples
