#include "examples/train/data/cifar.h"

#include <algorithm>
#include <cstring>

#include "examples/train/data/files.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSide = 32, kImageBytes = 3 * kSide * kSide;

/// The layout of one record: `label_bytes` labels, of which the last one counts, then the image.
struct Layout {
  std::string name;
  std::int64_t label_bytes = 1;
  int classes = 10;

  std::int64_t record_bytes() const { return label_bytes + kImageBytes; }
};

void check_length(const fs::path& file, std::size_t bytes, const Layout& layout) {
  const auto record = static_cast<std::size_t>(layout.record_bytes());
  if (bytes == 0)
    throw DataError(file.string() + " is empty; " + layout.name + " files hold records of " + std::to_string(record) + " bytes");
  if (bytes % record == 0) return;
  throw DataError(file.string() + " is truncated: its " + std::to_string(bytes) + " bytes are " + std::to_string(bytes / record) +
                  " records of " + std::to_string(record) + " bytes and " + std::to_string(bytes % record) +
                  " bytes more; get the file again, or give the binary version of " + layout.name);
}

ImageSet read_file(const fs::path& file, const Layout& layout) {
  const auto bytes = read_whole(file);
  check_length(file, bytes.size(), layout);
  const auto items = static_cast<std::int64_t>(bytes.size()) / layout.record_bytes();
  ImageSet set{torch::empty({items, 3, kSide, kSide}, torch::kUInt8), torch::empty({items}, torch::kInt64)};
  auto* images = set.images.data_ptr<std::uint8_t>();
  auto* labels = set.labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < items; ++i) {
    const std::uint8_t* record = bytes.data() + i * layout.record_bytes();
    const int label = record[layout.label_bytes - 1];
    if (label >= layout.classes) {
      throw DataError("record " + std::to_string(i) + " of " + file.string() + " has the label " + std::to_string(label) + "; labels of " +
                      layout.name + " are 0 to " + std::to_string(layout.classes - 1) +
                      ": the file is damaged or of another dataset, get it again");
    }
    labels[i] = label;
    std::memcpy(images + i * kImageBytes, record + layout.label_bytes, kImageBytes);
  }
  return set;
}

ImageSet read_files(const fs::path& folder, const std::vector<std::string>& files, const Layout& layout) {
  std::vector<torch::Tensor> images, labels;
  for (const auto& file : files) {
    std::error_code error;
    if (!fs::exists(folder / file, error)) continue;
    const auto set = read_file(folder / file, layout);
    images.push_back(set.images);
    labels.push_back(set.labels);
  }
  if (images.empty()) {
    throw DataError(folder.string() + " holds no " + files.front() + "; " + layout.name +
                    " needs both training and test files: unpack the archive again");
  }
  return {torch::cat(images), torch::cat(labels)};
}

Dataset read(const fs::path& folder, const Layout& layout, const std::vector<std::string>& train, const std::vector<std::string>& test) {
  Dataset data;
  data.name = layout.name;
  data.classes = layout.classes;
  data.train = read_files(folder, train, layout);
  data.test = read_files(folder, test, layout);
  data.augment = true;
  return data;
}

}  // namespace

Dataset read_cifar10(const std::string& directory) {
  const std::vector<std::string> train = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                                          "data_batch_5.bin"};
  const auto folder = find_folder(directory, "cifar-10-batches-bin", train, "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz");
  auto data = read(folder, {"CIFAR-10", 1, 10}, train, {"test_batch.bin"});
  data.mean = {0.4914F, 0.4822F, 0.4465F};
  data.deviation = {0.2470F, 0.2435F, 0.2616F};
  return data;
}

Dataset read_cifar100(const std::string& directory) {
  const auto folder = find_folder(directory, "cifar-100-binary", {"train.bin"}, "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz");
  auto data = read(folder, {"CIFAR-100", 2, 100}, {"train.bin"}, {"test.bin"});
  data.mean = {0.5071F, 0.4865F, 0.4409F};
  data.deviation = {0.2673F, 0.2564F, 0.2762F};
  return data;
}

}  // namespace examples
