#pragma once
/// The tutorial's data and schedule, and the line that all programs print, without LibTorch. The
/// data are small colour images of ten classes, each a wave of its own direction under a lot of
/// noise. They are computed, so nothing is downloaded, and they are the same on every rank. Your
/// own data takes their place.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

inline constexpr int kClasses = 10, kChannels = 3, kSide = 16, kPixels = kChannels * kSide * kSide;
// 1003: shares among ranks are not equal
inline constexpr int kTrainImages = 2048, kTestImages = 1003;

// The schedule that all programs share. kBatch is what all ranks take together at a step, so that
// any number of ranks does the same work.
inline constexpr int kEpochs = 3, kBatch = 64;
inline constexpr double kLearningRate = 0.05, kMomentum = 0.9;

/// Labelled images: the pixels of image i begin at i * kPixels.
struct ImageData {
  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
};

/// Returns `count` images. Another seed gives others of the same classes: those to test with.
inline ImageData make_images(int count, unsigned seed) {
  ImageData images;
  std::mt19937 random(seed);
  // from -1 to 1
  const auto uniform = [&random] { return static_cast<float>(random() >> 8) / (1 << 23) - 1; };
  for (int image = 0; image < count; ++image) {
    const int label = static_cast<int>(random() % kClasses);
    const float angle = 0.6F * static_cast<float>(label), shift = uniform();
    for (int pixel = 0; pixel < kPixels; ++pixel) {
      const int channel = pixel / (kSide * kSide), x = pixel % kSide, y = pixel / kSide % kSide;
      const float along =
          std::cos(angle) * static_cast<float>(x) + std::sin(angle) * static_cast<float>(y);
      images.pixels.push_back(0.22F * std::sin(0.8F * along + shift + static_cast<float>(channel)) +
                              uniform());
    }
    images.labels.push_back(label);
  }
  return images;
}

/// Prints the loss of an epoch at once, also into a file, and all its bits after it: programs that
/// are equal by design print the same.
inline void report(int epoch, double loss) {
  std::printf("epoch %d: loss %.6f (%a)\n", epoch + 1, loss, loss);
  std::fflush(stdout);
}
