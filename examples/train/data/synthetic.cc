#include "examples/train/data/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "examples/train/data/random.h"

namespace examples {
namespace {

constexpr int kClasses = 10, kChannels = 3;
constexpr float kAmplitude = 0.6F, kMean = 0.5F, kDeviation = 0.25F;

struct Wave {
  int x, y;  ///< whole waves across and down the image
};
constexpr std::array<Wave, kClasses> kWaves = {{{2, 0}, {0, 2}, {2, 2}, {2, -2}, {3, 1}, {1, 3}, {3, -1}, {1, -3}, {4, 0}, {0, 4}}};

std::array<double, kChannels> random_colour(Random& random) {
  std::array<double, kChannels> colour{};
  double square = 0;
  for (auto& part : colour) {
    part = random.bell();
    square += part * part;
  }
  for (auto& part : colour) part /= std::sqrt(square) + 1e-9;
  return colour;
}

std::uint8_t to_byte(double value) {
  return static_cast<std::uint8_t>(std::lround(255 * std::clamp(kMean + kDeviation * value, 0.0, 1.0)));
}

void draw(std::uint8_t* image, int label, const SyntheticOptions& options, Random random) {
  const auto wave = kWaves[static_cast<std::size_t>(label)];
  const auto colour = random_colour(random);
  const double phase = 2 * std::numbers::pi * random.uniform();
  const auto side = static_cast<int>(options.side);
  for (int y = 0; y < side; ++y) {
    for (int x = 0; x < side; ++x) {
      const double value = kAmplitude * std::cos(2 * std::numbers::pi * (wave.x * x + wave.y * y) / side + phase);
      for (int channel = 0; channel < kChannels; ++channel) {
        image[(channel * side + y) * side + x] = to_byte(value * colour[static_cast<std::size_t>(channel)] + options.noise * random.bell());
      }
    }
  }
}

ImageSet make_split(std::int64_t items, std::uint64_t split, const SyntheticOptions& options) {
  ImageSet set{torch::empty({items, kChannels, options.side, options.side}, torch::kUInt8), torch::empty({items}, torch::kInt64)};
  auto* images = set.images.data_ptr<std::uint8_t>();
  auto* labels = set.labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < items; ++i) {
    labels[i] = i % kClasses;
    draw(images + i * kChannels * options.side * options.side, static_cast<int>(labels[i]), options,
         Random{options.seed, split, static_cast<std::uint64_t>(i)});
  }
  return set;
}

}  // namespace

Dataset make_synthetic(const SyntheticOptions& options) {
  Dataset data;
  data.name = "synthetic";
  data.classes = kClasses;
  data.train = make_split(options.train_images, 0, options);
  data.test = make_split(options.test_images, 1, options);
  data.mean.assign(kChannels, kMean);
  data.deviation.assign(kChannels, kDeviation);
  return data;
}

}  // namespace examples
