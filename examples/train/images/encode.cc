#include "examples/train/images/encode.h"

#include <cstdlib>

#include "examples/train/images/jpeg_errors.h"

namespace examples {
namespace {

/// The frame that libjpeg's errors jump over; it has no destructors.
bool compress(jpeg_compress_struct& info, JpegErrors& errors, const std::uint8_t* values, Size size, const JpegOptions& options,
              unsigned char** out, unsigned long* count) {
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
  const auto stride = static_cast<std::size_t>(size.width) * static_cast<std::size_t>(info.input_components);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(values + info.next_scanline * stride);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  return true;
}

}  // namespace

std::vector<std::uint8_t> encode_jpeg(const std::vector<std::uint8_t>& rgb, Size size, const JpegOptions& options) {
  std::vector<std::uint8_t> grey;
  if (options.grey) {
    for (std::size_t i = 0; i < rgb.size(); i += 3) grey.push_back(rgb[i]);
  }
  jpeg_compress_struct info{};
  JpegErrors errors{};
  info.err = errors.install();
  unsigned char* out = nullptr;
  unsigned long count = 0;
  const bool good = compress(info, errors, options.grey ? grey.data() : rgb.data(), size, options, &out, &count);
  jpeg_destroy_compress(&info);
  std::vector<std::uint8_t> bytes;
  if (good) bytes.assign(out, out + count);
  std::free(out);
  if (!good) throw ImageError(errors.words);
  return bytes;
}

}  // namespace examples
