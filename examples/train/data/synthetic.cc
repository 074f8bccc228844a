#include "examples/train/data/synthetic.h"

#include "examples/train/data/synthetic_image.h"

namespace examples {
namespace {

constexpr int kChannels = 3;
constexpr float kMean = 0.5F, kDeviation = 0.25F;

ImageSet make_split(std::int64_t items, std::uint64_t split, const SyntheticOptions& options) {
  ImageSet set{torch::empty({items, kChannels, options.side, options.side}, torch::kUInt8), torch::empty({items}, torch::kInt64)};
  const SyntheticPicture picture{.side = static_cast<int>(options.side), .noise = options.noise, .seed = options.seed};
  auto* images = set.images.data_ptr<std::uint8_t>();
  auto* labels = set.labels.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < items; ++i) {
    labels[i] = i % kSyntheticClasses;
    draw_synthetic(images + i * kChannels * options.side * options.side, static_cast<int>(labels[i]), picture, split,
                   static_cast<std::uint64_t>(i));
  }
  return set;
}

}  // namespace

Dataset make_synthetic(const SyntheticOptions& options) {
  Dataset data;
  data.name = "synthetic";
  data.classes = kSyntheticClasses;
  data.train = make_split(options.train_images, 0, options);
  data.test = make_split(options.test_images, 1, options);
  data.mean.assign(kChannels, kMean);
  data.deviation.assign(kChannels, kDeviation);
  return data;
}

}  // namespace examples
