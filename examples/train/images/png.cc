#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <string>
#include <vector>

#include "examples/train/images/decode.h"

namespace examples {
namespace {

class PngImage final : public EncodedImage {
 public:
  explicit PngImage(std::span<const std::uint8_t> bytes) : rest_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, stay_silent);
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
    try {
      if (info_ == nullptr) throw ImageError("libpng has no memory, or another version than its header");
      if (!read_header()) throw ImageError(words_);
      set_size(png_get_image_width(png_, info_), png_get_image_height(png_, info_));
    } catch (...) {
      png_destroy_read_struct(&png_, &info_, nullptr);
      throw;
    }
  }
  ~PngImage() override { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngImage(const PngImage&) = delete;
  PngImage& operator=(const PngImage&) = delete;

  void decode(const Box& /*part*/, Pixels& into, int /*shrink*/) override {
    into.reset({0, 0, size().width, size().height});
    rows_.clear();
    for (int y = 0; y < size().height; ++y) rows_.push_back(into.row(y));
    if (!read_rows()) throw ImageError(words_);
  }

 private:
  static void fail(png_structp png, png_const_charp words) {
    static_cast<PngImage*>(png_get_error_ptr(png))->words_ = words;
    png_longjmp(png, 1);
  }
  static void stay_silent(png_structp, png_const_charp) {}

  static void read(png_structp png, png_bytep to, std::size_t count) {
    auto& rest = static_cast<PngImage*>(png_get_io_ptr(png))->rest_;
    if (count > rest.size()) png_error(png, "the file is truncated");
    std::memcpy(to, rest.data(), count);
    rest = rest.subspan(count);
  }

  bool read_header() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_user_limits(png_, 0x7FFFFFFF, 0x7FFFFFFF);  // set_size() has the limit, and words for it
    png_set_read_fn(png_, this, read);
    png_read_info(png_, info_);
    return true;
  }

  bool read_rows() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    const auto type = png_get_color_type(png_, info_);
    if (type == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
    if (type == PNG_COLOR_TYPE_GRAY) png_set_expand_gray_1_2_4_to_8(png_);
    if ((type & PNG_COLOR_MASK_COLOR) == 0) png_set_gray_to_rgb(png_);
    png_set_strip_16(png_);
    if ((type & PNG_COLOR_MASK_ALPHA) == 0) png_set_filler(png_, 255, PNG_FILLER_AFTER);  // otherwise alpha is the fourth byte
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    png_read_image(png_, rows_.data());
    png_read_end(png_, nullptr);
    return true;
  }

  std::span<const std::uint8_t> rest_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::string words_;
  std::vector<png_bytep> rows_;
};

}  // namespace

std::unique_ptr<EncodedImage> open_png(std::span<const std::uint8_t> bytes) { return std::make_unique<PngImage>(bytes); }

}  // namespace examples
