#pragma once
/// An ImageReader makes numbers for a network of an image file: it reads, decodes, crops, resizes
/// (LibTorch's antialiased bilinear one), mirrors and normalises, as torchvision does with its
/// default image loader. It is constant, so that any number of threads may use one; each thread
/// keeps buffers of its own. An image that cannot be used is an ImageError.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "examples/train/images/folder.h"
#include "examples/train/images/pixels.h"
#include "examples/train/images/random.h"

namespace examples {

/// A part of an image, to be resized to the output's size; for training as torchvision's
/// RandomResizedCrop and RandomHorizontalFlip.
struct Crop {
  Box box;
  bool mirror = false;
};

/// A box of 8 to 100 % of the image's area and an aspect ratio of 3/4 to 4/3, anywhere, half of
/// them mirrored. Where ten tries give no box that fits in the image, the middle of it.
Crop random_crop(Size image, Random& random);

struct ReaderOptions {
  int size = 224;  ///< of what the network is given, both ways
  int resize =
      256;  ///< validation: of the shorter side, before the middle is cut out; at least `size`
  /// Whether JPEG files of which at least twice the wanted pixels remain are decoded to a half,
  /// quarter or eighth: less work, and not the same values; a crop then begins at a multiple of 2,
  /// 4 or 8.
  bool shrink = true;
  std::array<float, 3> mean = {0.485F, 0.456F, 0.406F},
                       deviation = {0.229F, 0.224F, 0.225F};  ///< of pixel values from 0 to 1
};

/// What a byte becomes, for each channel.
using ByteTables = std::array<std::array<float, 256>, 3>;

class ImageReader {
 public:
  explicit ImageReader(const ReaderOptions& options);

  [[nodiscard]] const ReaderOptions& options() const { return options_; }
  /// Writes three planes (red, green, blue) of size x size numbers. Returns what was cut out.
  Crop read_training(const std::string& file, Random random, float* planes) const;
  void read_validation(const std::string& file, float* planes) const;

 private:
  ReaderOptions options_;
  ByteTables tables_;
};

struct BadImage {
  std::string file, why;
};

/// Writes a training image of the folder and returns its label. Which crop it is follows from seed,
/// epoch and image. A bad image is added to `bad`, and the next good one of the folder, with the
/// same random numbers, stands in for it. Throws FolderError where 100 in a row are bad.
int read_training_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image,
                        std::uint64_t seed, std::uint64_t epoch, float* planes,
                        std::vector<BadImage>& bad);

/// Writes a validation image; returns false where it is bad.
bool read_validation_image(const ImageReader& reader, const ImageFolder& folder, std::size_t image,
                           float* planes, std::vector<BadImage>& bad);

}  // namespace examples
