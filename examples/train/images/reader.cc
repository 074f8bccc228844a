#include "examples/train/images/reader.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <span>

#include "examples/train/images/codecs.h"

namespace examples {
namespace {

constexpr double kLeastArea = 0.08, kMostArea = 1;
constexpr double kLeastRatio = 3.0 / 4, kMostRatio = 4.0 / 3;

// halves to even, as Python does
int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }

double between(Random& random, double low, double high) {
  return low + (high - low) * random.uniform();
}

Box middle(Size image) {
  const double ratio = static_cast<double>(image.width) / image.height;
  int width = image.width, height = image.height;
  if (ratio < kLeastRatio) height = std::min(rounded(width / kLeastRatio), image.height);
  if (ratio > kMostRatio) width = std::min(rounded(height * kMostRatio), image.width);
  return {(image.width - width) / 2, (image.height - height) / 2, width, height};
}

Box random_box(Size image, Random& random) {
  const double area = static_cast<double>(image.width) * image.height;
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * between(random, kLeastArea, kMostArea);
    const double ratio = std::exp(between(random, std::log(kLeastRatio), std::log(kMostRatio)));
    const int width = rounded(std::sqrt(target * ratio)),
              height = rounded(std::sqrt(target / ratio));
    if (width <= 0 || width > image.width || height <= 0 || height > image.height) continue;
    const int top = random.below(image.height - height + 1),
              left = random.below(image.width - width + 1);
    return {left, top, width, height};
  }
  return middle(image);
}

constexpr int kMostBadInARow = 100;
constexpr std::int64_t kMostResized = std::int64_t{1} << 26;  // pixels of a resized image

/// What a thread keeps from image to image.
struct Buffers {
  std::vector<std::uint8_t> file;
  Pixels pixels;
};

Buffers& buffers() {
  thread_local Buffers mine;
  return mine;
}

/// Owns a file descriptor.
class OpenFile {
 public:
  explicit OpenFile(const std::string& name)
      : descriptor_(::open(name.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) fail("opened");
  }
  ~OpenFile() { ::close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  /// The whole file, in `buffer`.
  std::span<const std::uint8_t> read(std::vector<std::uint8_t>& buffer) const {
    struct stat about {};
    if (::fstat(descriptor_, &about) != 0) fail("read");
    if (!S_ISREG(about.st_mode)) throw ImageError("it is no file");
    const auto size = static_cast<std::size_t>(about.st_size);
    if (buffer.size() < size) buffer.resize(size);
    std::size_t done = 0;
    while (done < size) {
      const auto got = ::read(descriptor_, buffer.data() + done, size - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("read");
      if (got == 0) break;  // somebody made it shorter meanwhile
      done += static_cast<std::size_t>(got);
    }
    return {buffer.data(), done};
  }

 private:
  [[noreturn]] static void fail(const char* what) {
    throw ImageError(std::string("it cannot be ") + what + ": " + std::strerror(errno));
  }

  int descriptor_;
};

/// What becomes of an image: a part of it is resized, and the output cut out of that.
struct Cut {
  Box part;
  Size resized;
  int left = 0, top = 0;
};

/// By how much a JPEG file is shrunk while it is decoded: at least twice the wanted pixels remain.
int shrink_for(const Cut& cut) {
  int shrink = 8;
  while (shrink > 1 && (cut.part.width < 2 * shrink * cut.resized.width ||
                        cut.part.height < 2 * shrink * cut.resized.height))
    shrink /= 2;
  return shrink;
}

/// Resizes the part of an image that was shrunk so much, which is left without gaps between its
/// rows: LibTorch would start threads to copy them. Returns bytes of [channel, y, x], in whatever
/// order they lie.
at::Tensor resize(Pixels& image, const Box& shrunk, const Cut& cut, int shrink) {
  const at::InferenceMode guard;
  const std::size_t row = 4 * static_cast<std::size_t>(shrunk.width);
  for (int y = 0; y < shrunk.height; ++y)
    std::memmove(image.bytes.data() + static_cast<std::size_t>(y) * row,
                 image.at(shrunk.left, shrunk.top + y), row);
  const std::int64_t width_in = shrunk.width, height_in = shrunk.height;
  const auto pixels = at::from_blob(image.bytes.data(), {1, 4, height_in, width_in},
                                    {4 * width_in * height_in, 1, 4 * width_in, 4}, at::kByte);
  // Of the part itself: that of the shrunk image may end with a piece of a pixel.
  const auto scale = [shrink](int to, int from) { return static_cast<double>(to) * shrink / from; };
  const auto [width, height] = cut.resized;
  return at::_upsample_bilinear2d_aa(pixels, {height, width}, /*align_corners=*/false,
                                     scale(height, cut.part.height),
                                     scale(width, cut.part.width))[0];
}

/// Writes the planes. Returns the part that they were made of: of a file that is shrunk it begins
/// with a whole pixel of the shrunk image.
Box make(EncodedImage& image, Cut cut, bool mirror, const ReaderOptions& options,
         const ByteTables& tables, float* planes) {
  if (std::int64_t{cut.resized.width} * cut.resized.height > kMostResized)
    throw ImageError("its sides are too unlike to be resized");
  const int shrink = image.shrinks() && options.shrink ? shrink_for(cut) : 1;
  const int left = cut.part.left / shrink, top = cut.part.top / shrink;
  cut.part.left = left * shrink;
  cut.part.top = top * shrink;
  const auto end = [shrink](int begin, int length) {
    return (begin + length + shrink - 1) / shrink;
  };
  const Box shrunk{left, top, end(cut.part.left, cut.part.width) - left,
                   end(cut.part.top, cut.part.height) - top};
  auto& pixels = buffers().pixels;
  image.decode(shrunk, pixels, shrink);
  const at::Tensor resized = resize(pixels, shrunk, cut, shrink);
  const auto from = resized.accessor<std::uint8_t, 3>();
  for (int c = 0; c < 3; ++c) {
    const auto& table = tables[static_cast<std::size_t>(c)];
    for (int y = 0; y < options.size; ++y, planes += options.size) {
      for (int x = 0; x < options.size; ++x)
        planes[mirror ? options.size - 1 - x : x] = table[from[c][cut.top + y][cut.left + x]];
    }
  }
  return cut.part;
}

}  // namespace

Crop random_crop(Size image, Random& random) {
  const Box box = random_box(image, random);
  return {box, random.below(2) == 1};
}

ImageReader::ImageReader(const ReaderOptions& options) : options_(options) {
  for (std::size_t c = 0; c < tables_.size(); ++c) {
    for (std::size_t v = 0; v < 256; ++v)
      tables_[c][v] = (static_cast<float>(v) / 255.0F - options_.mean[c]) / options_.deviation[c];
  }
}

Crop ImageReader::read_training(const std::string& file, Random random, float* planes) const {
  const auto image = EncodedImage::open(OpenFile(file).read(buffers().file));
  Crop crop = random_crop(image->size(), random);
  crop.box = make(*image, {crop.box, {options_.size, options_.size}}, crop.mirror, options_,
                  tables_, planes);
  return crop;
}

void ImageReader::read_validation(const std::string& file, float* planes) const {
  const auto image = EncodedImage::open(OpenFile(file).read(buffers().file));
  const auto [width, height] = image->size();
  const auto other = [&](int longer, int shorter) {
    return static_cast<int>(static_cast<double>(options_.resize) * longer / shorter);
  };
  const Size resized{width > height ? other(width, height) : options_.resize,
                     width > height ? options_.resize : other(height, width)};
  const auto first = [&](int pixels) { return rounded((pixels - options_.size) / 2.0); };
  make(*image, {{0, 0, width, height}, resized, first(resized.width), first(resized.height)}, false,
       options_, tables_, planes);
}

int read_training_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image,
                        std::uint64_t seed, std::uint64_t epoch, float* planes,
                        std::vector<BadImage>& bad) {
  const Random random{seed, epoch, image};
  for (int tries = 0; tries < kMostBadInARow; ++tries, image = (image + 1) % folder.size()) {
    const auto file = folder.path(image);
    try {
      reader.read_training(file, random, planes);
      return folder.label(image);
    } catch (const ImageError& error) {
      bad.push_back({file, error.what()});
    }
  }
  throw FolderError("the last " + std::to_string(kMostBadInARow) +
                    " images that were tried are bad; the last one is " + bad.back().file + ": " +
                    bad.back().why);
}

bool read_validation_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image,
                           float* planes, std::vector<BadImage>& bad) {
  const auto file = folder.path(image);
  try {
    reader.read_validation(file, planes);
    return true;
  } catch (const ImageError& error) {
    bad.push_back({file, error.what()});
    return false;
  }
}

}  // namespace examples
