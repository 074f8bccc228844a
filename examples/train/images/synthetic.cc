#include "examples/train/images/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "examples/train/images/random.h"

namespace examples {
namespace {

constexpr int kChannels = 3;
constexpr float kAmplitude = 0.6F, kMean = 0.5F, kDeviation = 0.25F;

struct Wave {
  int x, y;  ///< whole waves across and down the image
};
constexpr std::array<Wave, kSyntheticClasses> kWaves = {
    {{2, 0}, {0, 2}, {2, 2}, {2, -2}, {3, 1}, {1, 3}, {3, -1}, {1, -3}, {4, 0}, {0, 4}}};

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
  return static_cast<std::uint8_t>(
      std::lround(255 * std::clamp(kMean + kDeviation * value, 0.0, 1.0)));
}

}  // namespace

void draw_synthetic(std::uint8_t* planes, int label, const SyntheticPicture& options,
                    std::uint64_t split, std::uint64_t number) {
  Random random{options.seed, split, number};
  const auto wave = kWaves[static_cast<std::size_t>(label)];
  const auto colour = random_colour(random);
  const double phase = 2 * std::numbers::pi * random.uniform();
  const int side = options.side;
  for (int y = 0; y < side; ++y) {
    for (int x = 0; x < side; ++x) {
      const double value =
          kAmplitude * std::cos(2 * std::numbers::pi * (wave.x * x + wave.y * y) / side + phase);
      for (int channel = 0; channel < kChannels; ++channel) {
        planes[(channel * side + y) * side + x] = to_byte(
            value * colour[static_cast<std::size_t>(channel)] + options.noise * random.bell());
      }
    }
  }
}

}  // namespace examples
