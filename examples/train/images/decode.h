#pragma once
/// An EncodedImage is a JPEG or PNG file in memory of which the header has been read and the pixels not yet, so that a caller who wants a
/// part of it pays for a part. Pixels are what Python's Pillow gives for `Image.open(file).convert("RGB")`: grey is repeated, CMYK is
/// converted, palettes are looked up, an alpha channel is dropped, of 16 bits the upper eight count; rotation in EXIF, colour profiles and
/// gamma are passed over. It is for one thread, refers to the bytes and throws ImageError.

#include <memory>
#include <span>

#include "examples/train/images/pixels.h"

namespace examples {

class EncodedImage {
 public:
  /// Reads the header. What kind of file it is say its first bytes, not its name.
  static std::unique_ptr<EncodedImage> open(std::span<const std::uint8_t> bytes);
  virtual ~EncodedImage() = default;

  [[nodiscard]] Size size() const { return size_; }

  /// Decodes at least the part, once. With a `shrink` of 2, 4 or 8, which a JPEG file is decoded to in about that much less time, `part` is
  /// one of the shrunk image, whose size is shrunk(). A file that cannot be shrunk ignores it.
  virtual void decode(const Box& part, Pixels& into, int shrink = 1) = 0;
  [[nodiscard]] virtual bool shrinks() const { return false; }
  [[nodiscard]] Size shrunk(int shrink) const { return {(size_.width + shrink - 1) / shrink, (size_.height + shrink - 1) / shrink}; }

 protected:
  /// Throws for images without pixels, and for those of more than 178 million, which Pillow takes for attacks.
  void set_size(std::uint32_t width, std::uint32_t height);

 private:
  Size size_;
};

/// Of a JPEG file, by libjpeg-turbo. A file that ends early is refused whatever the part, so that it does not depend on the part.
std::unique_ptr<EncodedImage> open_jpeg(std::span<const std::uint8_t> bytes);
/// Of a PNG file, by libpng. It is always decoded whole.
std::unique_ptr<EncodedImage> open_png(std::span<const std::uint8_t> bytes);

}  // namespace examples
