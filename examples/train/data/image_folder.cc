#include "examples/train/data/image_folder.h"

#include <filesystem>

namespace examples {
namespace {

namespace fs = std::filesystem;

std::shared_ptr<const ImageFolder> list(const fs::path& folder, const std::vector<std::string>& classes = {}) {
  try {
    return std::make_shared<const ImageFolder>(folder, classes);
  } catch (const FolderError& error) {
    throw DataError(error.what());
  } catch (const fs::filesystem_error& error) {
    throw DataError("cannot read " + folder.string() + ": " + error.what());
  }
}

Batch room_for(const Dataset& data, std::size_t items) {
  const auto shape = data.image_shape();
  return {torch::empty({static_cast<std::int64_t>(items), shape[0], shape[1], shape[2]}, torch::kFloat32),
          torch::empty({static_cast<std::int64_t>(items)}, torch::kInt64),
          {}};
}

std::string remarks_on(const ImageFolder& files, const std::string& name) {
  std::string words;
  const auto empty = files.empty_classes();
  if (!empty.empty()) {
    words += name + " has no images of " + std::to_string(empty.size()) + " of " + std::to_string(files.classes().size()) + " classes, " +
             empty.front() + (empty.size() > 1 ? " the first of them" : "");
  }
  if (files.passed_over() > 0) {
    words +=
        (words.empty() ? "" : "; ") + std::to_string(files.passed_over()) + " files in " + name + " are not called .jpg, .jpeg or .png";
  }
  return words;
}

std::string summary_of(const ImageFolder& files) {
  char text[120];
  std::snprintf(text, sizeof(text), "%zu images of %zu classes (names %016llx)", files.size(), files.classes().size(),
                static_cast<unsigned long long>(files.fingerprint()));
  return text;
}

}  // namespace

Dataset open_image_folder(const std::string& directory, const ReaderOptions& options) {
  std::error_code error;
  for (const char* part : {"train", "val"}) {
    if (fs::is_directory(fs::path(directory) / part, error)) continue;
    throw DataError("--data " + directory + " has no folder " + part +
                    "; it must have train and val, with a folder for each class in both and the class's images in it");
  }
  Dataset data;
  data.name = "folder";
  data.train.files = list(fs::path(directory) / "train");
  data.class_names = data.train.files->classes();
  data.test.files = list(fs::path(directory) / "val", data.class_names);
  data.classes = static_cast<int>(data.class_names.size());
  data.mean.assign(options.mean.begin(), options.mean.end());
  data.deviation.assign(options.deviation.begin(), options.deviation.end());
  data.augment = true;
  data.reader = std::make_shared<const ImageReader>(options);
  return data;
}

Batch read_training_batch(const Dataset& data, const Indices& indices, std::uint64_t seed, std::size_t epoch) {
  Batch batch = room_for(data, indices.size());
  auto* planes = batch.images.data_ptr<float>();
  auto* labels = batch.labels.data_ptr<std::int64_t>();
  const auto numbers = batch.images.numel() / std::max<std::int64_t>(batch.images.size(0), 1);
  for (const auto index : indices) {
    *labels++ = read_training_image(*data.reader, *data.train.files, index, seed, epoch, planes, batch.bad);
    planes += numbers;
  }
  return batch;
}

Batch read_validation_batch(const Dataset& data, const Indices& indices) {
  Batch batch = room_for(data, indices.size());
  auto* const planes = batch.images.data_ptr<float>();
  auto* const labels = batch.labels.data_ptr<std::int64_t>();
  const auto numbers = batch.images.numel() / std::max<std::int64_t>(batch.images.size(0), 1);
  std::int64_t good = 0;
  for (const auto index : indices) {
    if (!read_validation_image(*data.reader, *data.test.files, index, planes + good * numbers, batch.bad)) continue;
    labels[good++] = data.test.files->label(index);
  }
  batch.images = batch.images.narrow(0, 0, good);
  batch.labels = batch.labels.narrow(0, 0, good);
  return batch;
}

std::string remarks(const Dataset& data) {
  if (!data.reader) return {};
  const auto train = remarks_on(*data.train.files, "train"), val = remarks_on(*data.test.files, "val");
  return train + (train.empty() || val.empty() ? "" : "; ") + val;
}

std::string summary_of_files(const Dataset& data) {
  if (!data.reader) return {};
  return "train " + summary_of(*data.train.files) + ", val " + summary_of(*data.test.files);
}

}  // namespace examples
