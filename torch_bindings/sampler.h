#pragma once
/// Room card: a sampler that deals a data set's items to the ranks, each item once, and remembers how far training has come, so that the
/// rest of an epoch can be dealt again, to other ranks or another number of them. Copies share what is remembered: a DataLoader takes one,
/// the training loop keeps another to record its batches with.
/// The order of an epoch depends on the seed, the epoch and the number of items alone, on every machine: Fisher-Yates on a Mersenne
/// twister. Of what was left at the last reset, rank r of n gets items r, r + n, r + 2n ..., so that ranks that take equal batches have
/// at every step used up the beginning of the order; nothing is sent for that.
/// Thread: one at a time. Errors: NotInitialized; InvalidArgument for a state of other items.

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

class ElasticSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit ElasticSampler(std::size_t items, bool shuffle = true, std::uint64_t seed = 0, const ProcessSet& process_set = {});

  /// Deals what is left of the epoch to the ranks there are now. `new_size`: another number of items, of which none is used.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` of this rank's items; nothing when they are used up. A rank may have one item less than the first.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// This rank has used `count` more of the items that it was dealt, and the other ranks likewise.
  void record_batch(std::size_t count);
  /// The whole of that epoch, in its own order, none of it used.
  void set_epoch(std::size_t epoch);

  [[nodiscard]] std::size_t epoch() const;
  /// Items of this epoch that all ranks together have used.
  [[nodiscard]] std::size_t processed() const;
  /// Items that this rank was dealt by the last reset.
  [[nodiscard]] std::size_t size() const;
  /// Batches that the rank with most items has, since the last reset: the same on all ranks.
  [[nodiscard]] std::size_t batches(std::size_t batch_size) const;

  /// Epoch and items used; what `load` reads it deals to the ranks there are. All ranks should load the first rank's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// So that torch::save and torch::load take it.
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const ElasticSampler& sampler);
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, ElasticSampler& sampler);

}  // namespace hvd
