#pragma once
/// This writes JPEG files, for folders of images that are made (make_image_folder) and for tests. Throws ImageError.

#include <cstdint>
#include <string>
#include <vector>

#include "examples/train/images/pixels.h"

namespace examples {

struct JpegOptions {
  int quality = 90;
  int across = 2, down = 2;  ///< pixels per value of colour
  bool progressive = false;
  bool grey = false;  ///< of the red values
};

/// `rgb`: three bytes per pixel, row after row. Returns the bytes of a JPEG file.
std::vector<std::uint8_t> encode_jpeg(const std::vector<std::uint8_t>& rgb, Size size, const JpegOptions& options = {});

}  // namespace examples
