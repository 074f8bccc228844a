#include "examples/train/images/transforms.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace examples {
namespace {

constexpr double kLeastArea = 0.08, kMostArea = 1;
constexpr double kLeastRatio = 3.0 / 4, kMostRatio = 4.0 / 3;

int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }  // halves to even, as Python does

double between(Random& random, double low, double high) { return low + (high - low) * random.uniform(); }

Box middle(Size image) {
  const double ratio = static_cast<double>(image.width) / image.height;
  int width = image.width, height = image.height;
  if (ratio < kLeastRatio) height = std::min(rounded(width / kLeastRatio), image.height);
  if (ratio > kMostRatio) width = std::min(rounded(height * kMostRatio), image.width);
  return {(image.width - width) / 2, (image.height - height) / 2, width, height};
}

Box random_box(Size image, Random& random) {
  const double area = static_cast<double>(image.width) * image.height;
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * between(random, kLeastArea, kMostArea);
    const double ratio = std::exp(between(random, std::log(kLeastRatio), std::log(kMostRatio)));
    const int width = rounded(std::sqrt(target * ratio)), height = rounded(std::sqrt(target / ratio));
    if (width <= 0 || width > image.width || height <= 0 || height > image.height) continue;
    const int top = random.below(image.height - height + 1), left = random.below(image.width - width + 1);
    return {left, top, width, height};
  }
  return middle(image);
}

Stretch stretch(int pixels, int resized, int wanted) {
  const int first = rounded((resized - wanted) / 2.0);
  return {.begin = 0,
          .end = static_cast<double>(pixels),
          .limit_low = 0,
          .limit_high = pixels,
          .size = resized,
          .first = first,
          .count = wanted};
}

}  // namespace

Crop random_crop(Size image, Random& random) {
  const Box box = random_box(image, random);
  return {box, random.below(2) == 1};
}

CenterCrop center_crop(Size image, int resize, int size) {
  const auto other = [resize](int longer, int shorter) { return static_cast<int>(static_cast<double>(resize) * longer / shorter); };
  const bool wide = image.width > image.height;
  const int width = wide ? other(image.width, image.height) : resize, height = wide ? resize : other(image.height, image.width);
  return {stretch(image.width, width, size), stretch(image.height, height, size)};
}

}  // namespace examples
