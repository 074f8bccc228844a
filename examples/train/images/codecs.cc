#include "examples/train/images/codecs.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <string>

#include <jpeglib.h>

namespace examples {
namespace {

constexpr std::uint64_t kMostPixels = 178'956'970;

constexpr std::array<std::uint8_t, 3> kJpeg = {0xFF, 0xD8, 0xFF};
constexpr std::array<std::uint8_t, 8> kPng = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};

template <std::size_t n>
bool begins_with(std::span<const std::uint8_t> bytes, const std::array<std::uint8_t, n>& magic) {
  return bytes.size() >= n && std::memcmp(bytes.data(), magic.data(), n) == 0;
}

/// This is what libjpeg does on errors: it jumps back to where setjmp() was called. The frames that
/// are jumped over have no destructors.
struct JpegErrors {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char words[JMSG_LENGTH_MAX];

  /// Returns what `err` of libjpeg's structures is to be. The caller then calls setjmp(back)
  /// wherever it calls libjpeg.
  jpeg_error_mgr* install() {
    jpeg_std_error(&base);
    base.error_exit = [](j_common_ptr info) {
      auto* errors = reinterpret_cast<JpegErrors*>(info->err);
      errors->base.format_message(info, errors->words);
      std::longjmp(errors->back, 1);
    };
    base.emit_message = [](j_common_ptr, int) {};
    return &base;
  }
};

std::uint8_t scaled(unsigned a, unsigned b) {  // a * b / 255, rounded
  const unsigned product = a * b + 128;
  return static_cast<std::uint8_t>(((product >> 8) + product) >> 8);
}

/// In place, as Pillow does: files hold CMYK inverted, as Adobe's programs write it.
void rgb_of_cmyk(std::uint8_t* pixels, unsigned count) {
  for (; count > 0; --count, pixels += 4) {
    const unsigned light = pixels[3];
    for (int c = 0; c < 3; ++c)
      pixels[c] = static_cast<std::uint8_t>(light - scaled(255U - pixels[c], light));
  }
}

/// By libjpeg-turbo. A file that ends early is refused whatever the part, so that it does not
/// depend on the part.
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
      for (int y = 0; y < decoded_.height; ++y)
        rgb_of_cmyk(into.row(decoded_.top + y), static_cast<unsigned>(decoded_.width));
    }
    jpeg_abort_decompress(&info_);  // rows below the part are not wanted
  }

 private:
  [[nodiscard]] bool is_cmyk() const {
    return info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
  }

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
    const auto left = static_cast<JDIMENSION>(part.left),
               right = left + static_cast<JDIMENSION>(part.width);
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

/// The frame that libjpeg's errors jump over; it has no destructors.
bool compress(jpeg_compress_struct& info, JpegErrors& errors, const std::uint8_t* values, Size size,
              const JpegOptions& options, unsigned char** out, unsigned long* count) {
  if (setjmp(errors.back) != 0) return false;
  jpeg_create_compress(&info);
  jpeg_mem_dest(&info, out, count);
  info.image_width = static_cast<JDIMENSION>(size.width);
  info.image_height = static_cast<JDIMENSION>(size.height);
  info.input_components = options.grey ? 1 : 3;
  info.in_color_space = options.grey ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, options.quality, TRUE);
  if (!options.grey) {
    info.comp_info[0].h_samp_factor = options.across;
    info.comp_info[0].v_samp_factor = options.down;
  }
  if (options.progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  const auto stride =
      static_cast<std::size_t>(size.width) * static_cast<std::size_t>(info.input_components);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(values + info.next_scanline * stride);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  return true;
}

/// By libpng. It is always decoded whole.
class PngImage final : public EncodedImage {
 public:
  explicit PngImage(std::span<const std::uint8_t> bytes) : rest_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, stay_silent);
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
    try {
      if (info_ == nullptr)
        throw ImageError("libpng has no memory, or another version than its header");
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
    // set_size() has the limit, and words for it
    png_set_user_limits(png_, 0x7FFFFFFF, 0x7FFFFFFF);
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
    // otherwise alpha is the fourth byte
    if ((type & PNG_COLOR_MASK_ALPHA) == 0) png_set_filler(png_, 255, PNG_FILLER_AFTER);
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

std::unique_ptr<EncodedImage> EncodedImage::open(std::span<const std::uint8_t> bytes) {
  if (bytes.empty()) throw ImageError("the file is empty");
  if (begins_with(bytes, kJpeg)) return std::make_unique<JpegImage>(bytes);
  if (begins_with(bytes, kPng)) return std::make_unique<PngImage>(bytes);
  throw ImageError("the file is neither JPEG nor PNG");
}

void EncodedImage::set_size(std::uint32_t width, std::uint32_t height) {
  if (width == 0 || height == 0) throw ImageError("the image has no pixels");
  if (std::uint64_t{width} * height > kMostPixels) {
    throw ImageError("the image is said to have " + std::to_string(width) + " x " +
                     std::to_string(height) + " pixels, more than " + std::to_string(kMostPixels));
  }
  size_ = {static_cast<int>(width), static_cast<int>(height)};
}

std::vector<std::uint8_t> encode_jpeg(const std::vector<std::uint8_t>& rgb, Size size,
                                      const JpegOptions& options) {
  std::vector<std::uint8_t> grey;
  if (options.grey) {
    for (std::size_t i = 0; i < rgb.size(); i += 3) grey.push_back(rgb[i]);
  }
  jpeg_compress_struct info{};
  JpegErrors errors{};
  info.err = errors.install();
  unsigned char* out = nullptr;
  unsigned long count = 0;
  const bool good =
      compress(info, errors, options.grey ? grey.data() : rgb.data(), size, options, &out, &count);
  jpeg_destroy_compress(&info);
  std::vector<std::uint8_t> bytes;
  if (good) bytes.assign(out, out + count);
  std::free(out);
  if (!good) throw ImageError(errors.words);
  return bytes;
}

}  // namespace examples
