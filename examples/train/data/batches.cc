#include "examples/train/data/batches.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "examples/train/data/image_folder.h"
#include "examples/train/data/random.h"

namespace examples {
namespace {

constexpr int kShift = 4;

/// What is done to one image: pixel (y, x) comes from (y + down, x + right), after mirroring.
struct Augmentation {
  int down = 0, right = 0;
  bool mirror = false;
};

/// The value of each byte after normalisation, per channel.
std::vector<std::array<float, 256>> normalised(const Dataset& data) {
  std::vector<std::array<float, 256>> tables(data.mean.size());
  for (std::size_t c = 0; c < tables.size(); ++c) {
    for (std::size_t v = 0; v < 256; ++v) tables[c][v] = (static_cast<float>(v) / 255.0F - data.mean[c]) / data.deviation[c];
  }
  return tables;
}

void copy_plane(const std::uint8_t* from, float* to, int height, int width, const std::array<float, 256>& table, Augmentation how) {
  for (int y = 0; y < height; ++y) {
    const int from_y = y + how.down;
    for (int x = 0; x < width; ++x, ++to) {
      const int from_x = (how.mirror ? width - 1 - x : x) + how.right;
      const bool inside = from_y >= 0 && from_y < height && from_x >= 0 && from_x < width;
      *to = inside ? table[from[from_y * width + from_x]] : 0.0F;
    }
  }
}

template <class Choose>
Batch gather(const Dataset& data, const ImageSet& set, const Indices& indices, Choose choose) {
  const auto tables = normalised(data);
  const auto items = static_cast<std::int64_t>(indices.size());
  const auto channels = set.images.size(1), height = set.images.size(2), width = set.images.size(3), plane = height * width;
  Batch batch{torch::empty({items, channels, height, width}, torch::kFloat32), torch::empty({items}, torch::kInt64), {}};
  const auto* images = set.images.data_ptr<std::uint8_t>();
  const auto* labels = set.labels.data_ptr<std::int64_t>();
  auto* to = batch.images.data_ptr<float>();
  auto* to_labels = batch.labels.data_ptr<std::int64_t>();
  for (const auto index : indices) {
    *to_labels++ = labels[index];
    const Augmentation how = choose(index);
    const auto* from = images + static_cast<std::int64_t>(index) * channels * plane;
    for (std::int64_t c = 0; c < channels; ++c, from += plane, to += plane) {
      copy_plane(from, to, static_cast<int>(height), static_cast<int>(width), tables[static_cast<std::size_t>(c)], how);
    }
  }
  return batch;
}

BatchPlan::Options fitted(BatchPlan::Options options) {
  const std::size_t passes = options.shard.ranks * options.accumulate;
  if (options.items < passes) {
    throw std::invalid_argument(std::to_string(options.items) + " training images are too few for " + std::to_string(options.shard.ranks) +
                                " ranks with --accumulate " + std::to_string(options.accumulate) +
                                ": every rank needs at least one per backward pass; start fewer ranks or give more data");
  }
  options.batch_size = std::min(options.batch_size, options.items / passes);
  return options;
}

}  // namespace

BatchPlan::BatchPlan(Options options) : options_(fitted(options)), sampler_(options.items, /*num_replicas=*/1, /*rank=*/0) {}

void BatchPlan::start_epoch(std::size_t epoch, std::size_t position) {
  sampler_.set_epoch(Random{options_.seed, epoch}.next() >> 32);  // the sampler's generator takes 32 bits
  sampler_.reset();
  position_ = std::min(position, options_.items);
  if (position_ > 0) sampler_.next(position_);
}

std::vector<Indices> BatchPlan::next() {
  std::vector<Indices> batches;
  if (over()) return batches;
  const auto step = *sampler_.next(images_per_step());
  position_ += step.size();
  const auto size = static_cast<std::ptrdiff_t>(options_.batch_size), ranks = static_cast<std::ptrdiff_t>(options_.shard.ranks);
  for (std::ptrdiff_t pass = 0; pass < static_cast<std::ptrdiff_t>(options_.accumulate); ++pass) {
    const auto begin = step.begin() + (pass * ranks + static_cast<std::ptrdiff_t>(options_.shard.rank)) * size;
    batches.emplace_back(begin, begin + size);
  }
  return batches;
}

Batch make_batch(const Dataset& data, const ImageSet& set, const Indices& indices) {
  if (set.files) return read_validation_batch(data, indices);
  return gather(data, set, indices, [](std::size_t) { return Augmentation{}; });
}

Batch make_training_batch(const Dataset& data, const Indices& indices, std::uint64_t seed, std::size_t epoch) {
  if (data.train.files) return read_training_batch(data, indices, seed, epoch);
  if (!data.augment) return make_batch(data, data.train, indices);
  return gather(data, data.train, indices, [&](std::size_t index) {
    Random random{seed, epoch, index};
    const int down = random.below(2 * kShift + 1) - kShift, right = random.below(2 * kShift + 1) - kShift;
    return Augmentation{down, right, random.below(2) == 1};
  });
}

}  // namespace examples
