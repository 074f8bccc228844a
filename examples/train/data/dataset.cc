#include "examples/train/data/dataset.h"

#include <cstdio>
#include <filesystem>

#include "examples/train/images/synthetic.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

constexpr int kChannels = 3;
constexpr float kMean = 0.5F, kDeviation = 0.25F;

ImageSet make_split(std::int64_t items, std::uint64_t split, const SyntheticOptions& options) {
  ImageSet set{torch::empty({items, kChannels, options.side, options.side}, torch::kUInt8),
               torch::empty({items}, torch::kInt64)};
  const SyntheticPicture picture{
      .side = static_cast<int>(options.side), .noise = options.noise, .seed = options.seed};
  auto* images = set.images.data_ptr<std::uint8_t>();
  auto* labels = set.labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < items; ++i) {
    labels[i] = i % kSyntheticClasses;
    draw_synthetic(images + i * kChannels * options.side * options.side,
                   static_cast<int>(labels[i]), picture, split, static_cast<std::uint64_t>(i));
  }
  return set;
}

std::shared_ptr<const ImageFolder> list(const fs::path& folder,
                                        const std::vector<std::string>& classes = {}) {
  try {
    return std::make_shared<const ImageFolder>(folder, classes);
  } catch (const FolderError& error) {
    throw DataError(error.what());
  } catch (const fs::filesystem_error& error) {
    throw DataError("cannot read " + folder.string() + ": " + error.what());
  }
}

std::string remarks_on(const ImageFolder& files, const std::string& name) {
  std::string words;
  const auto empty = files.empty_classes();
  if (!empty.empty()) {
    words += name + " has no images of " + std::to_string(empty.size()) + " of " +
             std::to_string(files.classes().size()) + " classes, " + empty.front() +
             (empty.size() > 1 ? " the first of them" : "");
  }
  if (files.passed_over() > 0) {
    words += (words.empty() ? "" : "; ") + std::to_string(files.passed_over()) + " files in " +
             name + " are not called .jpg, .jpeg or .png";
  }
  return words;
}

std::string summary_of(const ImageFolder& files) {
  char text[120];
  std::snprintf(text, sizeof(text), "%zu images of %zu classes (names %016llx)", files.size(),
                files.classes().size(), static_cast<unsigned long long>(files.fingerprint()));
  return text;
}

}  // namespace

const std::vector<std::string>& dataset_names() {
  static const std::vector<std::string> names = {"cifar10", "cifar100", "folder", "mnist",
                                                 "synthetic"};
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

Dataset make_synthetic(const SyntheticOptions& options) {
  Dataset data;
  data.name = "synthetic";
  data.classes = kSyntheticClasses;
  data.train = make_split(options.train_images, 0, options);
  data.test = make_split(options.test_images, 1, options);
  data.mean.assign(kChannels, kMean);
  data.deviation.assign(kChannels, kDeviation);
  return data;
}

Dataset open_image_folder(const std::string& directory, const ReaderOptions& options) {
  std::error_code error;
  for (const char* part : {"train", "val"}) {
    if (fs::is_directory(fs::path(directory) / part, error)) continue;
    throw DataError("--data " + directory + " has no folder " + part +
                    "; it must have train and val, with a folder for each class in both and the "
                    "class's images in it");
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

std::string remarks(const Dataset& data) {
  if (!data.reader) return {};
  const auto train = remarks_on(*data.train.files, "train"),
             val = remarks_on(*data.test.files, "val");
  return train + (train.empty() || val.empty() ? "" : "; ") + val;
}

std::string summary_of_files(const Dataset& data) {
  if (!data.reader) return {};
  return "train " + summary_of(*data.train.files) + ", val " + summary_of(*data.test.files);
}

}  // namespace examples
