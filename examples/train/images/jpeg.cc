#include <algorithm>
#include <string>

#include "examples/train/images/decode.h"
#include "examples/train/images/jpeg_errors.h"

namespace examples {
namespace {

std::uint8_t scaled(unsigned a, unsigned b) {  // a * b / 255, rounded
  const unsigned product = a * b + 128;
  return static_cast<std::uint8_t>(((product >> 8) + product) >> 8);
}

/// In place, as Pillow does: files hold CMYK inverted, as Adobe's programs write it.
void rgb_of_cmyk(std::uint8_t* pixels, unsigned count) {
  for (; count > 0; --count, pixels += 4) {
    const unsigned light = pixels[3];
    for (int c = 0; c < 3; ++c) pixels[c] = static_cast<std::uint8_t>(light - scaled(255U - pixels[c], light));
  }
}

class JpegImage final : public EncodedImage {
 public:
  explicit JpegImage(std::span<const std::uint8_t> bytes) : bytes_(bytes) {
    info_.err = errors_.install();
    jpeg_create_decompress(&info_);
    try {
      if (!read_header()) throw ImageError(errors_.words);
      set_size(info_.image_width, info_.image_height);
      check_end();
    } catch (...) {
      jpeg_destroy_decompress(&info_);
      throw;
    }
  }
  ~JpegImage() override { jpeg_destroy_decompress(&info_); }
  JpegImage(const JpegImage&) = delete;
  JpegImage& operator=(const JpegImage&) = delete;

  [[nodiscard]] bool shrinks() const override { return true; }

  void decode(const Box& part, Pixels& into, int shrink) override {
    info_.out_color_space = is_cmyk() ? JCS_CMYK : JCS_EXT_RGBX;
    info_.scale_num = 1;
    info_.scale_denom = static_cast<unsigned>(shrink);
    if (!start(part)) throw ImageError(errors_.words);
    into.reset(decoded_);
    if (!read_rows(into)) throw ImageError(errors_.words);
    if (is_cmyk()) {
      for (int y = 0; y < decoded_.height; ++y) rgb_of_cmyk(into.row(decoded_.top + y), static_cast<unsigned>(decoded_.width));
    }
    jpeg_abort_decompress(&info_);  // rows below the part are not wanted
  }

 private:
  [[nodiscard]] bool is_cmyk() const { return info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK; }

  bool read_header() {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_mem_src(&info_, bytes_.data(), bytes_.size());
    jpeg_read_header(&info_, TRUE);
    return true;
  }

  /// Throws unless the mark of the end follows the header. (One in the header is of a thumbnail.)
  void check_end() const {
    const std::uint8_t* const data = info_.src->next_input_byte;
    for (std::size_t i = info_.src->bytes_in_buffer; i >= 2; --i) {
      if (data[i - 2] == 0xFF && data[i - 1] == JPEG_EOI) return;
    }
    throw ImageError("the file is truncated: it has no end mark");
  }

  /// Columns: with neighbours, of which the upsampling of colours makes the outer ones.
  bool start(const Box& part) {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_start_decompress(&info_);
    const auto margin = static_cast<JDIMENSION>(2 * info_.max_h_samp_factor);
    const auto left = static_cast<JDIMENSION>(part.left), right = left + static_cast<JDIMENSION>(part.width);
    JDIMENSION offset = left > margin ? left - margin : 0;
    JDIMENSION width = std::min(right + margin, info_.output_width) - offset;
    if (offset > 0 || width < info_.output_width) jpeg_crop_scanline(&info_, &offset, &width);
    decoded_ = {static_cast<int>(offset), part.top, static_cast<int>(width), part.height};
    if (part.top > 0) jpeg_skip_scanlines(&info_, static_cast<JDIMENSION>(part.top));
    return true;
  }

  bool read_rows(Pixels& into) {
    if (setjmp(errors_.back) != 0) return false;
    const auto end = static_cast<JDIMENSION>(decoded_.top + decoded_.height);
    while (info_.output_scanline < end) {
      JSAMPROW rows[4];
      JDIMENSION count = 0;
      for (; count < 4 && info_.output_scanline + count < end; ++count)
        rows[count] = into.row(static_cast<int>(info_.output_scanline + count));
      jpeg_read_scanlines(&info_, rows, count);
    }
    return true;
  }

  const std::span<const std::uint8_t> bytes_;
  jpeg_decompress_struct info_{};
  JpegErrors errors_{};
  Box decoded_;
};

}  // namespace

std::unique_ptr<EncodedImage> open_jpeg(std::span<const std::uint8_t> bytes) { return std::make_unique<JpegImage>(bytes); }

}  // namespace examples
