#include "examples/train/images/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "examples/train/images/codecs.h"

namespace examples {
namespace {

constexpr double kLeastArea = 0.08, kMostArea = 1;
constexpr double kLeastRatio = 3.0 / 4, kMostRatio = 4.0 / 3;

int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }  // halves to even, as Python does

double between(Random& random, double low, double high) { return low + (high - low) * random.uniform(); }

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
    const int width = rounded(std::sqrt(target * ratio)), height = rounded(std::sqrt(target / ratio));
    if (width <= 0 || width > image.width || height <= 0 || height > image.height) continue;
    const int top = random.below(image.height - height + 1), left = random.below(image.width - width + 1);
    return {left, top, width, height};
  }
  return middle(image);
}

Stretch stretch(int pixels, int resized, int wanted) {
  const int first = rounded((resized - wanted) / 2.0);
  return {.begin = 0,
          .end = static_cast<double>(pixels),
          .limit_low = 0,
          .limit_high = pixels,
          .size = resized,
          .first = first,
          .count = wanted};
}

constexpr int kMostBadInARow = 100;

/// What a thread keeps from image to image.
struct Buffers {
  std::vector<std::uint8_t> file;
  Pixels pixels;
  Resampler resampler;
};

Buffers& buffers() {
  thread_local Buffers mine;
  return mine;
}

/// Owns a file descriptor.
class OpenFile {
 public:
  explicit OpenFile(const std::string& name) : descriptor_(::open(name.c_str(), O_RDONLY | O_CLOEXEC)) {
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
  [[noreturn]] static void fail(const char* what) { throw ImageError(std::string("it cannot be ") + what + ": " + std::strerror(errno)); }

  int descriptor_;
};

/// The image's pixels count as shrunk by this much.
int shrink_for(const EncodedImage& image, const Stretch& across, const Stretch& down) {
  if (!image.shrinks()) return 1;
  const double factor = std::min((across.end - across.begin) / across.size, (down.end - down.begin) / down.size);
  for (const int shrink : {8, 4, 2}) {
    if (factor >= 2 * shrink) return shrink;
  }
  return 1;
}

Stretch shrunk(Stretch stretch, int shrink, int limit) {
  stretch.begin /= shrink;
  stretch.end /= shrink;
  stretch.limit_low /= shrink;
  stretch.limit_high = std::min((stretch.limit_high + shrink - 1) / shrink, limit);
  return stretch;
}

void make(EncodedImage& image, Stretch across, Stretch down, bool mirror, bool may_shrink, const ChannelTables& tables, float* planes) {
  auto& mine = buffers();
  const int shrink = may_shrink ? shrink_for(image, across, down) : 1;
  if (shrink > 1) {
    const Size size = image.shrunk(shrink);
    across = shrunk(across, shrink, size.width);
    down = shrunk(down, shrink, size.height);
  }
  mine.resampler.prepare(across, down);
  image.decode(mine.resampler.needed(), mine.pixels, shrink);
  mine.resampler.run(mine.pixels, mirror, tables, planes);
}

Stretch stretch_of(int begin, int length, int size) {
  return {.begin = static_cast<double>(begin),
          .end = static_cast<double>(begin + length),
          .limit_low = begin,
          .limit_high = begin + length,
          .size = size,
          .first = 0,
          .count = size};
}

}  // namespace

Crop random_crop(Size image, Random& random) {
  const Box box = random_box(image, random);
  return {box, random.below(2) == 1};
}

CenterCrop center_crop(Size image, int resize, int size) {
  const auto other = [resize](int longer, int shorter) { return static_cast<int>(static_cast<double>(resize) * longer / shorter); };
  const bool wide = image.width > image.height;
  const int width = wide ? other(image.width, image.height) : resize, height = wide ? resize : other(image.height, image.width);
  return {stretch(image.width, width, size), stretch(image.height, height, size)};
}

ImageReader::ImageReader(const ReaderOptions& options) : options_(options) {
  for (std::size_t c = 0; c < tables_.size(); ++c) {
    for (std::size_t v = 0; v < 256; ++v) tables_[c][v] = (static_cast<float>(v) / 255.0F - options_.mean[c]) / options_.deviation[c];
  }
}

Crop ImageReader::read_training(const std::string& file, Random random, float* planes) const {
  const auto image = EncodedImage::open(OpenFile(file).read(buffers().file));
  const Crop crop = random_crop(image->size(), random);
  make(*image, stretch_of(crop.box.left, crop.box.width, options_.size), stretch_of(crop.box.top, crop.box.height, options_.size),
       crop.mirror, options_.shrink, tables_, planes);
  return crop;
}

void ImageReader::read_validation(const std::string& file, float* planes) const {
  const auto image = EncodedImage::open(OpenFile(file).read(buffers().file));
  const auto crop = center_crop(image->size(), options_.resize, options_.size);
  make(*image, crop.across, crop.down, false, options_.shrink, tables_, planes);
}

int read_training_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image, std::uint64_t seed, std::uint64_t epoch,
                        float* planes, std::vector<BadImage>& bad) {
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
  throw FolderError("the last " + std::to_string(kMostBadInARow) + " images that were tried are bad; the last one is " + bad.back().file +
                    ": " + bad.back().why);
}

bool read_validation_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image, float* planes,
                           std::vector<BadImage>& bad) {
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
