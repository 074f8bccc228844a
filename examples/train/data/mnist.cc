#include "examples/train/data/mnist.h"

#include <cstring>
#include <span>

#include "examples/train/data/files.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

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
  return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
}

/// The file or its gzipped form.
fs::path find_file(const fs::path& folder, const std::string& name) {
  for (const auto& file : {folder / name, folder / (name + ".gz")}) {
    std::error_code error;
    if (fs::exists(file, error)) return file;
  }
  throw DataError(folder.string() + " holds neither " + name + " nor " + name + ".gz; get all four files from " + kWhereFrom);
}

Idx read_idx(const fs::path& folder, const std::string& name, std::size_t dims) {
  Idx idx{.file = find_file(folder, name), .header = 4 + 4 * dims};
  idx.bytes = read_whole(idx.file);
  const std::uint32_t magic = 0x800 + static_cast<std::uint32_t>(dims);  // 8: bytes
  if (idx.bytes.size() < idx.header || big_endian(idx.bytes.data()) != magic) {
    throw DataError(idx.file.string() + " is no idx file of bytes in " + std::to_string(dims) + " dimensions; get it again from " +
                    kWhereFrom);
  }
  std::uint64_t expected = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    idx.sizes.push_back(big_endian(idx.bytes.data() + 4 + 4 * d));
    expected *= static_cast<std::uint64_t>(idx.sizes.back());
  }
  if (idx.bytes.size() - idx.header != expected) {
    throw DataError(idx.file.string() + " is truncated: its header promises " + std::to_string(expected) + " bytes of data, it has " +
                    std::to_string(idx.bytes.size() - idx.header) + "; get it again from " + kWhereFrom);
  }
  return idx;
}

torch::Tensor labels_of(const Idx& idx) {
  auto labels = torch::empty(idx.sizes, torch::kInt64);
  auto* out = labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < labels.size(0); ++i) {
    out[i] = idx.data()[i];
    if (out[i] >= kDigits) {
      throw DataError("item " + std::to_string(i) + " of " + idx.file.string() + " has the label " + std::to_string(out[i]) +
                      "; labels of MNIST are 0 to 9: the file is damaged or of another dataset, get it again from " + kWhereFrom);
    }
  }
  return labels;
}

ImageSet read_split(const fs::path& folder, const std::string& split) {
  const auto images = read_idx(folder, split + "-images-idx3-ubyte", 3);
  const auto labels = read_idx(folder, split + "-labels-idx1-ubyte", 1);
  if (images.sizes[0] != labels.sizes[0]) {
    throw DataError(images.file.string() + " holds " + std::to_string(images.sizes[0]) + " images, " + labels.file.string() + " " +
                    std::to_string(labels.sizes[0]) + " labels; take both from the same place");
  }
  if (images.sizes[0] == 0 || images.sizes[1] == 0 || images.sizes[2] == 0) throw DataError(images.file.string() + " holds no images");
  ImageSet set{torch::empty({images.sizes[0], 1, images.sizes[1], images.sizes[2]}, torch::kUInt8), labels_of(labels)};
  std::memcpy(set.images.data_ptr(), images.data(), images.bytes.size() - images.header);
  return set;
}

}  // namespace

Dataset read_mnist(const std::string& directory) {
  const std::string images = "train-images-idx3-ubyte";
  const auto folder = find_folder(directory, "MNIST/raw", {images, images + ".gz"}, kWhereFrom);
  Dataset data;
  data.name = "MNIST";
  data.classes = kDigits;
  data.train = read_split(folder, "train");
  data.test = read_split(folder, "t10k");
  if (data.train.images.sizes().slice(1) != data.test.images.sizes().slice(1)) {
    throw DataError("the training and test images in " + folder.string() + " differ in size; take all four files from the same place");
  }
  data.mean = {0.1307F};
  data.deviation = {0.3081F};
  return data;
}

}  // namespace examples
