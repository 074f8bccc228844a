#include "torch_bindings/training/sampler.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "torch_bindings/files/archives.h"

namespace hvd {

struct ElasticSampler::State {
  std::size_t items = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  ElasticSamplerOptions options;

  std::size_t epoch = 0;
  std::vector<std::size_t> order;  ///< of the epoch
  std::size_t base = 0;            ///< items used before the last reset: the first in the order
  std::size_t ranks = 1, rank = 0;
  std::size_t taken = 0, recorded = 0;  ///< of this rank's items since then

  void arrange();
  void deal(std::size_t used);
  void refuse_other_share(std::size_t batch_size) const;
  [[nodiscard]] std::size_t left() const { return items - base; }
  [[nodiscard]] std::size_t part(std::size_t of, std::size_t whose) const {
    return of / ranks + (whose < of % ranks ? 1 : 0);
  }
  /// Batches that all ranks make together and that are complete; without a size all is the rest.
  [[nodiscard]] std::size_t full() const {
    return options.global_batch == 0 ? 0 : left() / options.global_batch;
  }
  [[nodiscard]] std::size_t share() const { return part(options.global_batch, rank); }
  /// Returns what is left over after those, for the rank that has most of it.
  [[nodiscard]] std::size_t rest() const { return left() - full() * options.global_batch; }
  [[nodiscard]] std::size_t most_of_rest() const {
    return rest() / ranks + (options.shares != Shares::DropLast && rest() % ranks > 0 ? 1 : 0);
  }
  /// One batch of it at most: where padding would make two of it, the rank's share of the global
  /// batch is enough for what is left.
  [[nodiscard]] std::size_t own_rest() const {
    if (options.shares == Shares::Uneven) return part(rest(), rank);
    return options.global_batch == 0 ? most_of_rest() : std::min(most_of_rest(), share());
  }
  [[nodiscard]] std::size_t own() const { return full() * share() + own_rest(); }
  /// Item `index` of this rank. What is left begins again where padding needs more of it.
  [[nodiscard]] std::size_t item(std::size_t index) const {
    const std::size_t batch = options.global_batch == 0 ? 0 : std::min(index / share(), full());
    return order[base + (batch * options.global_batch + rank + (index - batch * share()) * ranks) %
                            left()];
  }
  [[nodiscard]] std::size_t processed() const {
    if (recorded > 0 && recorded == own()) return items;
    const std::size_t batch = options.global_batch == 0 ? 0 : std::min(recorded / share(), full());
    return std::min(items,
                    base + batch * options.global_batch + (recorded - batch * share()) * ranks);
  }
};

namespace {

/// A loader would give nothing, as at the end of an epoch, and training seem to be done.
void refuse_empty_batch(std::size_t batch_size) {
  if (batch_size == 0)
    throw InvalidArgument(
        "ElasticSampler: a batch of 0 items; a batch that all ranks share needs as many items as "
        "ranks (share_of_batch())");
}

/// A number below `limit`, each as likely as the others. Of one's own: the distributions of the
/// standard library differ between libraries.
std::uint64_t below(std::uint64_t limit, std::mt19937_64& random) {
  const std::uint64_t rest = (std::mt19937_64::max() % limit + 1) % limit;
  std::uint64_t number = random();
  while (number > std::mt19937_64::max() - rest) number = random();
  return number % limit;
}

/// Neighbouring seeds and epochs give orders that have nothing to do with each other (the finaliser
/// of SplitMix64, Steele et al. 2014).
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace

void ElasticSampler::State::arrange() {
  order.resize(items);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (!shuffle) return;
  std::mt19937_64 random(mixed(mixed(seed) ^ epoch));
  for (std::size_t i = items; i > 1; --i) std::swap(order[i - 1], order[below(i, random)]);
}

void ElasticSampler::State::deal(std::size_t used) {
  base = used;
  ranks = static_cast<std::size_t>(options.process_set.size());
  rank = static_cast<std::size_t>(options.process_set.rank());
  if (options.global_batch > 0)
    static_cast<void>(
        share_of_batch(static_cast<std::int64_t>(options.global_batch), options.process_set));
  taken = recorded = 0;
}

void ElasticSampler::State::refuse_other_share(std::size_t batch_size) const {
  if (options.global_batch == 0 || batch_size == share()) return;
  throw InvalidArgument(
      formatted("ElasticSampler: a batch of {} items, but this rank's share of a global batch of "
                "{} is {}; take share_of_batch({})",
                batch_size, options.global_batch, share(), options.global_batch));
}

ElasticSampler::ElasticSampler(std::size_t items, bool shuffle, std::uint64_t seed,
                               const ElasticSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  if (!options.process_set.included())
    throw InvalidArgument("ElasticSampler: this rank is not in the process set");
  state_->items = items;
  state_->shuffle = shuffle;
  state_->seed = seed;
  state_->options = options;
  state_->arrange();
  state_->deal(0);
}

void ElasticSampler::reset(std::optional<std::size_t> new_size) {
  std::size_t used = state_->processed();
  if (new_size && *new_size != state_->items) {
    state_->items = *new_size;
    state_->arrange();
    used = 0;
  }
  state_->deal(used);
  if (state_->left() == 0 && state_->items > 0 && state_->rank == 0)
    log(LogLevel::Warning,
        "ElasticSampler: all {} items of epoch {} have been recorded; it gives no more before "
        "set_epoch()",
        state_->items, state_->epoch);
}

std::optional<std::vector<std::size_t>> ElasticSampler::next(std::size_t batch_size) {
  refuse_empty_batch(batch_size);
  state_->refuse_other_share(batch_size);
  const std::size_t count = std::min(batch_size, state_->own() - state_->taken);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> batch;
  for (std::size_t i = 0; i < count; ++i) batch.push_back(state_->item(state_->taken + i));
  state_->taken += count;
  return batch;
}

void ElasticSampler::record_batch(std::size_t count) {
  state_->recorded = std::min(state_->own(), state_->recorded + count);
}

void ElasticSampler::set_epoch(std::size_t epoch) {
  state_->epoch = epoch;
  state_->arrange();
  state_->deal(0);
}

std::size_t ElasticSampler::epoch() const { return state_->epoch; }
std::size_t ElasticSampler::processed() const { return state_->processed(); }
std::size_t ElasticSampler::size() const { return state_->own(); }

std::size_t ElasticSampler::batches(std::size_t batch_size) const {
  refuse_empty_batch(batch_size);
  state_->refuse_other_share(batch_size);
  const std::size_t rest = state_->most_of_rest();
  if (state_->options.global_batch > 0) return state_->full() + (rest > 0 ? 1 : 0);
  return (rest + batch_size - 1) / batch_size;
}

void ElasticSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto write = [&](const char* key, std::size_t value) {
    archive.write(key, c10::IValue(static_cast<std::int64_t>(value)));
  };
  write("items", state_->items);
  write("seed", state_->seed);
  write("shuffle", state_->shuffle ? 1 : 0);
  write("epoch", state_->epoch);
  write("processed", state_->processed());
}

void ElasticSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    return static_cast<std::size_t>(detail::value_at(archive, key).toInt());
  };
  const std::size_t items = read("items"), seed = read("seed"), shuffle = read("shuffle"),
                    epoch = read("epoch"), used = read("processed");
  if (items != state_->items || seed != state_->seed || (shuffle != 0) != state_->shuffle)
    throw InvalidArgument(
        formatted("ElasticSampler: a state of {} items with seed {}, {}, but this sampler has {} "
                  "with seed {}, {}",
                  items, seed, shuffle != 0 ? "shuffled" : "in order", state_->items, state_->seed,
                  state_->shuffle ? "shuffled" : "in order"));
  state_->epoch = epoch;
  state_->arrange();
  state_->deal(std::min(used, items));
}

}  // namespace hvd
