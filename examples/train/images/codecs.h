#pragma once
/// JPEG and PNG files in memory. An EncodedImage is one of which the header has been read and the
/// pixels not yet, so that a caller who wants a part of it pays for a part. Pixels are what
/// Python's Pillow gives for `Image.open(file).convert("RGB")`: grey is repeated, CMYK is
/// converted, palettes are looked up, an alpha channel is dropped, of 16 bits the upper eight
/// count; rotation in EXIF, colour profiles and gamma are passed over. It is for one thread, refers
/// to the bytes and throws ImageError. JPEG files are also written, for folders of images that are
/// made (make_image_folder) and for tests.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/train/images/pixels.h"

namespace examples {

class EncodedImage {
 public:
  /// Reads the header. What kind of file it is say its first bytes, not its name.
  static std::unique_ptr<EncodedImage> open(std::span<const std::uint8_t> bytes);
  virtual ~EncodedImage() = default;

  [[nodiscard]] Size size() const { return size_; }

  /// Decodes at least the part, once. With a `shrink` of 2, 4 or 8, which a JPEG file is decoded to
  /// in about that much less time, `part` is one of the shrunk image, whose size is shrunk(). A
  /// file that cannot be shrunk ignores it.
  virtual void decode(const Box& part, Pixels& into, int shrink = 1) = 0;
  [[nodiscard]] virtual bool shrinks() const { return false; }
  [[nodiscard]] Size shrunk(int shrink) const {
    return {(size_.width + shrink - 1) / shrink, (size_.height + shrink - 1) / shrink};
  }

 protected:
  /// Throws for images without pixels, and for those of more than 178 million, which Pillow takes
  /// for attacks.
  void set_size(std::uint32_t width, std::uint32_t height);

 private:
  Size size_;
};

struct JpegOptions {
  int quality = 90;
  int across = 2, down = 2;  ///< pixels per value of colour
  bool progressive = false;
  bool grey = false;  ///< of the red values
};

/// `rgb`: three bytes per pixel, row after row. Returns the bytes of a JPEG file.
std::vector<std::uint8_t> encode_jpeg(const std::vector<std::uint8_t>& rgb, Size size,
                                      const JpegOptions& options = {});

}  // namespace examples
