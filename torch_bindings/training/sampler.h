#pragma once
/// An ElasticSampler deals a data set's items to the ranks, the same number to each, and remembers
/// how far training has come, so that the rest of an epoch can be dealt again, to other ranks or
/// another number of them. Copies share what is remembered: a DataLoader takes one, the training
/// loop keeps another to choose the epoch and record its batches with. The order of an epoch
/// depends on the seed, the epoch and the number of items alone, on every machine: Fisher-Yates on
/// a Mersenne twister. Of what was left at the last reset, rank r of n gets items r, r + n, r + 2n
/// ..., so that ranks that take equal batches have at every step used up the beginning of the
/// order; nothing is sent for that. With a `global_batch` that holds for each batch of it. One
/// thread at a time may use it, but that `next()` may run in another one (a loader's,
/// prefetch_to_device()) beside what records and looks. It refuses a rank that is not in the
/// process set and a state of other items (InvalidArgument); throws NotInitialized. Without
/// `set_epoch` every epoch has the order of the first, as with PyTorch's samplers; after
/// `record_batch` it has what is left of it.

#include <torch/data/samplers/base.h>
#include <torch/data/samplers/serialize.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Shares says what happens to the items that are left over where the ranks cannot share evenly. In
/// training every rank needs as many batches as the others: who has one more waits for their
/// gradients for ever.
enum class Shares : std::uint8_t {
  Pad,  ///< all ranks get the larger number; items from the beginning of what is dealt come twice
        ///< (fewer than ranks: more often)
  DropLast,  ///< all ranks get the smaller number; the last items of the order are left out of this
             ///< epoch
  Uneven,  ///< each item once, so some ranks get one item more: for evaluation, where nobody waits
           ///< for anybody
};

/// ElasticSamplerOptions are those of an ElasticSampler; equal on all ranks.
struct ElasticSamplerOptions {
  Shares shares = Shares::Pad;  ///< what happens to items that are left over
  ProcessSet process_set{};     ///< the ranks that share the items
  /// The size of a batch that all ranks make together, in which items are dealt: this rank's share
  /// of one is share_of_batch(global_batch), as `next()` must be asked for, and all ranks have as
  /// many batches, also where the shares differ by one. At least as many as ranks (else
  /// InvalidArgument). 0: ranks take equal batches, of any size.
  std::size_t global_batch = 0;
};

/// An ElasticSampler is a sampler of LibTorch's kind.
class ElasticSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Deals `items` items of the first epoch, in an order that the seed gives if `shuffle`. All
  /// ranks must say the same.
  explicit ElasticSampler(std::size_t items, bool shuffle = true, std::uint64_t seed = 0,
                          const ElasticSamplerOptions& options = {});
  /// Does the same with a process set as the only option.
  template <std::same_as<ProcessSet> Set>
  ElasticSampler(std::size_t items, bool shuffle, std::uint64_t seed, const Set& process_set)
      : ElasticSampler(items, shuffle, seed, ElasticSamplerOptions{.process_set = process_set}) {}

  /// Deals what is left of the epoch to the ranks there are now; warns if nothing is, as in a
  /// second epoch without `set_epoch`. `new_size`: another number of items, of which none is used.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns up to `batch_size` of this rank's items; nothing when they are used up. Throws
  /// InvalidArgument for a batch of 0, as training on nothing would look like an epoch that has
  /// ended, and with a `global_batch` for another number than this rank's share.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Notes that this rank has used `count` more of its items, and the other ranks likewise.
  void record_batch(std::size_t count);
  /// Deals the whole of that epoch, in its own order, none of it used. To be called before the
  /// loader begins the epoch; a DataLoader that has a copy of this sampler takes it from there.
  void set_epoch(std::size_t epoch);

  /// Returns the epoch that was chosen last, 0 before.
  [[nodiscard]] std::size_t epoch() const;
  /// Returns the number of items of this epoch that all ranks together have used; all of them when
  /// this rank has recorded the last of its own.
  [[nodiscard]] std::size_t processed() const;
  /// Returns the number of items that this rank was dealt by the last reset: the same on all ranks
  /// unless they are Shares::Uneven, or have different shares of a `global_batch`.
  [[nodiscard]] std::size_t size() const;
  /// Returns the number of batches that the rank with most items has, since the last reset: the
  /// same on all ranks. The last may be smaller.
  [[nodiscard]] std::size_t batches(std::size_t batch_size) const;

  /// Writes epoch and items used.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what save() wrote, and deals the rest to the ranks there are. All ranks should load the
  /// first rank's.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hvd
#pragma GCC visibility pop
