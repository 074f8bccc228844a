#pragma once
/// This is a folder of JPEG and PNG files, a folder per class in train/ and in val/, as a dataset. Images are read when batches are made.

#include <string>

#include "examples/train/data/batches.h"
#include "examples/train/data/dataset.h"

namespace examples {

/// Lists the files. Throws DataError that says what is wrong and what to do.
Dataset open_image_folder(const std::string& directory, const ReaderOptions& options);

/// Reads training images; another image stands in for a bad one (images/reader.h), which the batch names.
Batch read_training_batch(const Dataset& data, const Indices& indices, std::uint64_t seed, std::size_t epoch);
/// Reads validation images. Bad ones are left out and named.
Batch read_validation_batch(const Dataset& data, const Indices& indices);

/// What is worth saying of the list: classes without images, files that are none. Empty if nothing is.
std::string remarks(const Dataset& data);

/// Equal on ranks that have found the same files; for people, too.
std::string summary_of_files(const Dataset& data);

}  // namespace examples
