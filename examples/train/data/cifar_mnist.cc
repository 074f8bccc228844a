#include "examples/train/data/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

namespace examples {
namespace {

namespace fs = std::filesystem;

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool holds_any(const fs::path& folder, const std::vector<std::string>& files) {
  return std::any_of(files.begin(), files.end(), [&](const auto& file) {
    std::error_code error;
    return fs::is_regular_file(folder / file, error);
  });
}

/// `directory` itself, or its folder `subfolder` (as archives unpack to), whichever holds at least
/// one of `files`. `where_from` says in the error where the files can be had.
fs::path find_folder(const std::string& directory, const std::string& subfolder,
                     const std::vector<std::string>& files, const std::string& where_from) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw DataError("--data " + directory + " is not a folder; give the folder that holds " +
                    list(files) + "; get them from " + where_from);
  }
  for (const auto& folder : {fs::path(directory), fs::path(directory) / subfolder}) {
    if (holds_any(folder, files)) return folder;
  }
  throw DataError("--data " + directory + " holds none of " + list(files) + "; get them from " +
                  where_from);
}

/// The bytes of a file, unpacked if it is gzipped.
std::vector<std::uint8_t> read_whole(const fs::path& file) {
  errno = 0;
  // reads files that are not gzipped as they are
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(file.c_str(), "rb"), gzclose);
  if (!in)
    throw DataError("cannot open " + file.string() + ": " +
                    std::strerror(errno == 0 ? ENOMEM : errno));
  std::vector<std::uint8_t> bytes;
  constexpr unsigned kChunk = 1U << 20;
  for (;;) {
    const std::size_t before = bytes.size();
    bytes.resize(before + kChunk);
    const int got = gzread(in.get(), bytes.data() + before, kChunk);
    bytes.resize(before + static_cast<std::size_t>(std::max(got, 0)));
    int code = Z_OK;
    const char* words = gzerror(in.get(), &code);
    if (got < 0 || code == Z_BUF_ERROR) {
      const std::string reason = code == Z_ERRNO ? std::strerror(errno) : words;
      throw DataError("cannot read " + file.string() + ": " + reason +
                      "; if the file was not copied whole, get it again");
    }
    if (got == 0) return bytes;
  }
}

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
    throw DataError(file.string() + " is empty; " + layout.name + " files hold records of " +
                    std::to_string(record) + " bytes");
  if (bytes % record == 0) return;
  throw DataError(file.string() + " is truncated: its " + std::to_string(bytes) + " bytes are " +
                  std::to_string(bytes / record) + " records of " + std::to_string(record) +
                  " bytes and " + std::to_string(bytes % record) +
                  " bytes more; get the file again, or give the binary version of " + layout.name);
}

ImageSet read_file(const fs::path& file, const Layout& layout) {
  const auto bytes = read_whole(file);
  check_length(file, bytes.size(), layout);
  const auto items = static_cast<std::int64_t>(bytes.size()) / layout.record_bytes();
  ImageSet set{torch::empty({items, 3, kSide, kSide}, torch::kUInt8),
               torch::empty({items}, torch::kInt64)};
  auto* images = set.images.data_ptr<std::uint8_t>();
  auto* labels = set.labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < items; ++i) {
    const std::uint8_t* record = bytes.data() + i * layout.record_bytes();
    const int label = record[layout.label_bytes - 1];
    if (label >= layout.classes) {
      throw DataError("record " + std::to_string(i) + " of " + file.string() + " has the label " +
                      std::to_string(label) + "; labels of " + layout.name + " are 0 to " +
                      std::to_string(layout.classes - 1) +
                      ": the file is damaged or of another dataset, get it again");
    }
    labels[i] = label;
    std::memcpy(images + i * kImageBytes, record + layout.label_bytes, kImageBytes);
  }
  return set;
}

ImageSet read_files(const fs::path& folder, const std::vector<std::string>& files,
                    const Layout& layout) {
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

Dataset read(const fs::path& folder, const Layout& layout, const std::vector<std::string>& train,
             const std::vector<std::string>& test) {
  Dataset data;
  data.name = layout.name;
  data.classes = layout.classes;
  data.train = read_files(folder, train, layout);
  data.test = read_files(folder, test, layout);
  data.augment = true;
  return data;
}

constexpr const char* kWhereFrom = "https://ossci-datasets.s3.amazonaws.com/mnist/";
constexpr int kDigits = 10;

/// An idx file of bytes: `sizes` says how they are arranged.
struct Idx {
  fs::path file;
  std::vector<std::int64_t> sizes;
  std::vector<std::uint8_t> bytes;  ///< the header included
  std::size_t header = 0;

  const std::uint8_t* data() const { return bytes.data() + header; }
};

std::uint32_t big_endian(const std::uint8_t* at) {
  return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 |
         at[3];
}

/// The file or its gzipped form.
fs::path find_file(const fs::path& folder, const std::string& name) {
  for (const auto& file : {folder / name, folder / (name + ".gz")}) {
    std::error_code error;
    if (fs::exists(file, error)) return file;
  }
  throw DataError(folder.string() + " holds neither " + name + " nor " + name +
                  ".gz; get all four files from " + kWhereFrom);
}

Idx read_idx(const fs::path& folder, const std::string& name, std::size_t dims) {
  Idx idx{.file = find_file(folder, name), .header = 4 + 4 * dims};
  idx.bytes = read_whole(idx.file);
  const std::uint32_t magic = 0x800 + static_cast<std::uint32_t>(dims);  // 8: bytes
  if (idx.bytes.size() < idx.header || big_endian(idx.bytes.data()) != magic) {
    throw DataError(idx.file.string() + " is no idx file of bytes in " + std::to_string(dims) +
                    " dimensions; get it again from " + kWhereFrom);
  }
  std::uint64_t expected = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    idx.sizes.push_back(big_endian(idx.bytes.data() + 4 + 4 * d));
    expected *= static_cast<std::uint64_t>(idx.sizes.back());
  }
  if (idx.bytes.size() - idx.header != expected) {
    throw DataError(idx.file.string() + " is truncated: its header promises " +
                    std::to_string(expected) + " bytes of data, it has " +
                    std::to_string(idx.bytes.size() - idx.header) + "; get it again from " +
                    kWhereFrom);
  }
  return idx;
}

torch::Tensor labels_of(const Idx& idx) {
  auto labels = torch::empty(idx.sizes, torch::kInt64);
  auto* out = labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < labels.size(0); ++i) {
    out[i] = idx.data()[i];
    if (out[i] >= kDigits) {
      throw DataError("item " + std::to_string(i) + " of " + idx.file.string() + " has the label " +
                      std::to_string(out[i]) +
                      "; labels of MNIST are 0 to 9: the file is damaged or of another dataset, "
                      "get it again from " +
                      kWhereFrom);
    }
  }
  return labels;
}

ImageSet read_split(const fs::path& folder, const std::string& split) {
  const auto images = read_idx(folder, split + "-images-idx3-ubyte", 3);
  const auto labels = read_idx(folder, split + "-labels-idx1-ubyte", 1);
  if (images.sizes[0] != labels.sizes[0]) {
    throw DataError(images.file.string() + " holds " + std::to_string(images.sizes[0]) +
                    " images, " + labels.file.string() + " " + std::to_string(labels.sizes[0]) +
                    " labels; take both from the same place");
  }
  if (images.sizes[0] == 0 || images.sizes[1] == 0 || images.sizes[2] == 0)
    throw DataError(images.file.string() + " holds no images");
  ImageSet set{torch::empty({images.sizes[0], 1, images.sizes[1], images.sizes[2]}, torch::kUInt8),
               labels_of(labels)};
  std::memcpy(set.images.data_ptr(), images.data(), images.bytes.size() - images.header);
  return set;
}

}  // namespace

Dataset read_cifar10(const std::string& directory) {
  const std::vector<std::string> train = {"data_batch_1.bin", "data_batch_2.bin",
                                          "data_batch_3.bin", "data_batch_4.bin",
                                          "data_batch_5.bin"};
  const auto folder = find_folder(directory, "cifar-10-batches-bin", train,
                                  "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz");
  auto data = read(folder, {"CIFAR-10", 1, 10}, train, {"test_batch.bin"});
  data.mean = {0.4914F, 0.4822F, 0.4465F};
  data.deviation = {0.2470F, 0.2435F, 0.2616F};
  return data;
}

Dataset read_cifar100(const std::string& directory) {
  const auto folder = find_folder(directory, "cifar-100-binary", {"train.bin"},
                                  "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz");
  auto data = read(folder, {"CIFAR-100", 2, 100}, {"train.bin"}, {"test.bin"});
  data.mean = {0.5071F, 0.4865F, 0.4409F};
  data.deviation = {0.2673F, 0.2564F, 0.2762F};
  return data;
}

Dataset read_mnist(const std::string& directory) {
  const std::string images = "train-images-idx3-ubyte";
  const auto folder = find_folder(directory, "MNIST/raw", {images, images + ".gz"}, kWhereFrom);
  Dataset data;
  data.name = "MNIST";
  data.classes = kDigits;
  data.train = read_split(folder, "train");
  data.test = read_split(folder, "t10k");
  if (data.train.images.sizes().slice(1) != data.test.images.sizes().slice(1)) {
    throw DataError("the training and test images in " + folder.string() +
                    " differ in size; take all four files from the same place");
  }
  data.mean = {0.1307F};
  data.deviation = {0.3081F};
  return data;
}

}  // namespace examples
