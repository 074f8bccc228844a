#include "examples/train/data/batches.h"

#include <algorithm>
#include <array>

#include "examples/train/images/random.h"

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
    for (std::size_t v = 0; v < 256; ++v)
      tables[c][v] = (static_cast<float>(v) / 255.0F - data.mean[c]) / data.deviation[c];
  }
  return tables;
}

void copy_plane(const std::uint8_t* from, float* to, int height, int width,
                const std::array<float, 256>& table, Augmentation how) {
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
Batch gather(const Dataset& data, const ImageSet& set, Indices indices, Choose choose) {
  const auto tables = normalised(data);
  const auto items = static_cast<std::int64_t>(indices.size());
  const auto channels = set.images.size(1), height = set.images.size(2), width = set.images.size(3),
             plane = height * width;
  Batch batch{{torch::empty({items, channels, height, width}, torch::kFloat32),
               torch::empty({items}, torch::kInt64)}};
  const auto* images = set.images.data_ptr<std::uint8_t>();
  const auto* labels = set.labels.data_ptr<std::int64_t>();
  auto* to = batch.data.data_ptr<float>();
  auto* to_labels = batch.target.data_ptr<std::int64_t>();
  for (const auto index : indices) {
    *to_labels++ = labels[index];
    const Augmentation how = choose(index);
    const auto* from = images + static_cast<std::int64_t>(index) * channels * plane;
    for (std::int64_t c = 0; c < channels; ++c, from += plane, to += plane) {
      copy_plane(from, to, static_cast<int>(height), static_cast<int>(width),
                 tables[static_cast<std::size_t>(c)], how);
    }
  }
  return batch;
}

Batch room_for(const Dataset& data, std::size_t items) {
  const auto shape = data.image_shape();
  return {{torch::empty({static_cast<std::int64_t>(items), shape[0], shape[1], shape[2]},
                        torch::kFloat32),
           torch::empty({static_cast<std::int64_t>(items)}, torch::kInt64)}};
}

/// Another image stands in for a bad one (images/reader.h), which the batch names.
Batch read_training_batch(const Dataset& data, Indices indices, std::uint64_t seed,
                          std::size_t epoch) {
  Batch batch = room_for(data, indices.size());
  auto* planes = batch.data.data_ptr<float>();
  auto* labels = batch.target.data_ptr<std::int64_t>();
  const auto numbers = batch.data.numel() / std::max<std::int64_t>(batch.data.size(0), 1);
  for (const auto index : indices) {
    *labels++ =
        read_training_image(*data.reader, *data.train.files, index, seed, epoch, planes, batch.bad);
    planes += numbers;
  }
  return batch;
}

/// Bad ones are left out and named.
Batch read_validation_batch(const Dataset& data, Indices indices) {
  Batch batch = room_for(data, indices.size());
  auto* const planes = batch.data.data_ptr<float>();
  auto* const labels = batch.target.data_ptr<std::int64_t>();
  const auto numbers = batch.data.numel() / std::max<std::int64_t>(batch.data.size(0), 1);
  std::int64_t good = 0;
  for (const auto index : indices) {
    if (!read_validation_image(*data.reader, *data.test.files, index, planes + good * numbers,
                               batch.bad))
      continue;
    labels[good++] = data.test.files->label(index);
  }
  batch.data = batch.data.narrow(0, 0, good);
  batch.target = batch.target.narrow(0, 0, good);
  return batch;
}

}  // namespace

Batch make_batch(const Dataset& data, const ImageSet& set, Indices indices) {
  if (set.files) return read_validation_batch(data, indices);
  return gather(data, set, indices, [](std::size_t) { return Augmentation{}; });
}

Batch make_training_batch(const Dataset& data, Indices indices, std::uint64_t seed,
                          std::size_t epoch) {
  if (data.train.files) return read_training_batch(data, indices, seed, epoch);
  if (!data.augment) return make_batch(data, data.train, indices);
  return gather(data, data.train, indices, [&](std::size_t index) {
    Random random{seed, epoch, index};
    const int down = random.below(2 * kShift + 1) - kShift,
              right = random.below(2 * kShift + 1) - kShift;
    return Augmentation{down, right, random.below(2) == 1};
  });
}

}  // namespace examples
