#pragma once
/// These are the values that decoding and resampling share: pixels, sizes, boxes. They are plain
/// values without threads. An image that cannot be used is an ImageError, whose text says why and
/// does not name the file: the caller knows it.

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace examples {

class ImageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Size {
  int width = 0, height = 0;
};

/// Of an image, in pixels.
struct Box {
  int left = 0, top = 0, width = 0, height = 0;
  bool operator==(const Box&) const = default;
};

/// A part of an image, four bytes per pixel: red, green, blue, and one of any value. The buffer is
/// kept and used again.
struct Pixels {
  Box part;                         ///< where it lies in the image
  std::vector<std::uint8_t> bytes;  ///< part.height rows of `stride` bytes
  std::size_t stride = 0;

  /// Makes room for a part. The bytes are of any value.
  void reset(const Box& box) {
    part = box;
    stride = 4 * static_cast<std::size_t>(box.width);
    if (bytes.size() < stride * static_cast<std::size_t>(box.height))
      bytes.resize(stride * static_cast<std::size_t>(box.height));
  }
  /// The pixel at (x, y) of the image.
  [[nodiscard]] const std::uint8_t* at(int x, int y) const {
    return bytes.data() + static_cast<std::size_t>(y - part.top) * stride +
           4 * static_cast<std::size_t>(x - part.left);
  }
  std::uint8_t* row(int y) {
    return bytes.data() + static_cast<std::size_t>(y - part.top) * stride;
  }
};

}  // namespace examples
