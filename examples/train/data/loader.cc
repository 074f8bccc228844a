#include "examples/train/data/loader.h"

#include <algorithm>
#include <utility>

namespace examples {
namespace {

std::vector<Batch> make_step(const Dataset& data, const std::vector<Indices>& micro_batches, std::uint64_t seed, std::size_t epoch,
                             bool pinned) {
  const torch::NoGradGuard no_grad;
  std::vector<Batch> batches;
  for (const auto& indices : micro_batches) {
    Batch batch = make_training_batch(data, indices, seed, epoch);
    if (pinned) batch = {batch.images.pin_memory(), batch.labels.pin_memory(), std::move(batch.bad)};
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace

BatchLoader::BatchLoader(const Dataset& data, BatchPlan::Options plan, Options options)
    : data_(data), plan_(plan), seed_(plan.seed), options_(options), workers_(options.workers) {
  options_.pinned = options_.pinned && torch::cuda::is_available();
}

void BatchLoader::start_epoch(std::size_t epoch, std::size_t position) {
  workers_.drop();
  positions_.clear();
  plan_.start_epoch(epoch, position);
  epoch_ = epoch;
  position_ = plan_.position();
  if (options_.workers > 0) order_ahead();
}

void BatchLoader::order_ahead() {
  const std::size_t ahead = options_.workers == 0 ? 1 : std::max<std::size_t>({options_.ahead, options_.workers, 1});
  while (positions_.size() < ahead) {
    auto indices = plan_.next();
    if (indices.empty()) return;
    positions_.push_back(plan_.position());
    workers_.order(
        [this, indices = std::move(indices), epoch = epoch_] { return make_step(data_, indices, seed_, epoch, options_.pinned); });
  }
}

std::vector<Batch> BatchLoader::next() {
  if (positions_.empty()) order_ahead();
  if (positions_.empty()) return {};
  const auto position = positions_.front();
  positions_.pop_front();
  if (options_.workers > 0) order_ahead();
  auto batches = workers_.take();  // the oldest, whatever was ordered after it
  position_ = position;
  return batches;
}

}  // namespace examples
