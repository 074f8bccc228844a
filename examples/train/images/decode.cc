#include "examples/train/images/decode.h"

#include <array>
#include <cstring>
#include <string>

namespace examples {
namespace {

constexpr std::uint64_t kMostPixels = 178'956'970;

constexpr std::array<std::uint8_t, 3> kJpeg = {0xFF, 0xD8, 0xFF};
constexpr std::array<std::uint8_t, 8> kPng = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};

template <std::size_t n>
bool begins_with(std::span<const std::uint8_t> bytes, const std::array<std::uint8_t, n>& magic) {
  return bytes.size() >= n && std::memcmp(bytes.data(), magic.data(), n) == 0;
}

}  // namespace

std::unique_ptr<EncodedImage> EncodedImage::open(std::span<const std::uint8_t> bytes) {
  if (bytes.empty()) throw ImageError("the file is empty");
  if (begins_with(bytes, kJpeg)) return open_jpeg(bytes);
  if (begins_with(bytes, kPng)) return open_png(bytes);
  throw ImageError("the file is neither JPEG nor PNG");
}

void EncodedImage::set_size(std::uint32_t width, std::uint32_t height) {
  if (width == 0 || height == 0) throw ImageError("the image has no pixels");
  if (std::uint64_t{width} * height > kMostPixels) {
    throw ImageError("the image is said to have " + std::to_string(width) + " x " + std::to_string(height) + " pixels, more than " +
                     std::to_string(kMostPixels));
  }
  size_ = {static_cast<int>(width), static_cast<int>(height)};
}

}  // namespace examples
