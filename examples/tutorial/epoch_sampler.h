#pragma once
/// EpochSampler is for the programs without ranks: a sampler with a new order in every epoch, the
/// one that hvd::ElasticSampler deals to the ranks. So single.cc trains on the batches that the
/// others share. Outside of this comparison, LibTorch's RandomSampler does.

#include <torch/data/samplers/base.h>

#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

class EpochSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit EpochSampler(std::size_t items) : state_(std::make_shared<State>()) {
    state_->order.resize(items);
    set_epoch(0);
  }
  /// Chooses the order of the next epoch. The loader's copy of this sampler takes it from here.
  void set_epoch(std::size_t epoch) {
    std::iota(state_->order.begin(), state_->order.end(), std::size_t{0});
    std::mt19937_64 random(mixed(mixed(0) ^ epoch));
    for (std::size_t i = state_->order.size(); i > 1; --i) {
      // each place as likely as the others
      const std::uint64_t rest = (std::mt19937_64::max() % i + 1) % i;
      std::uint64_t number = random();
      while (number > std::mt19937_64::max() - rest) number = random();
      std::swap(state_->order[i - 1], state_->order[number % i]);
    }
    state_->taken = 0;
  }

  void reset(std::optional<std::size_t> /*new_size*/ = std::nullopt) override { state_->taken = 0; }
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    const auto& order = state_->order;
    const std::size_t begin = state_->taken, end = std::min(begin + batch_size, order.size());
    if (begin == end) return std::nullopt;
    state_->taken = end;
    return std::vector<std::size_t>(order.begin() + static_cast<std::ptrdiff_t>(begin),
                                    order.begin() + static_cast<std::ptrdiff_t>(end));
  }
  void save(torch::serialize::OutputArchive& /*archive*/) const override {}
  void load(torch::serialize::InputArchive& /*archive*/) override {}

 private:
  struct State {
    std::vector<std::size_t> order;
    std::size_t taken = 0;
  };
  /// Neighbouring epochs get orders that have nothing to do with each other (SplitMix64).
  static std::uint64_t mixed(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }

  std::shared_ptr<State> state_;
};
