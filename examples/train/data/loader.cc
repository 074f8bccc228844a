#include "examples/train/data/loader.h"

#include <algorithm>
#include <utility>

namespace examples {

BatchLoader::BatchLoader(const Dataset& data, BatchPlan::Options plan, Options options)
    : data_(data), plan_(plan), seed_(plan.seed), options_(options) {
  options_.pinned = options_.pinned && torch::cuda::is_available();
  for (std::size_t i = 0; i < options_.workers; ++i) workers_.emplace_back([this] { work(); });
}

BatchLoader::~BatchLoader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void BatchLoader::start_epoch(std::size_t epoch, std::size_t position) {
  {
    const std::lock_guard lock(mutex_);
    to_do_.clear();
  }
  queue_.clear();
  plan_.start_epoch(epoch, position);
  epoch_ = epoch;
  position_ = plan_.position();
  if (!workers_.empty()) order_ahead();
}

void BatchLoader::order_ahead() {
  const std::size_t ahead = std::max<std::size_t>({options_.ahead, workers_.size(), 1});
  while (queue_.size() < ahead) {
    auto step = std::make_shared<Step>();
    step->indices = plan_.next();
    if (step->indices.empty()) return;
    step->epoch = epoch_;
    step->position_after = plan_.position();
    queue_.push_back(step);
    if (workers_.empty()) return;
    const std::lock_guard lock(mutex_);
    to_do_.push_back(std::move(step));
    changed_.notify_all();
  }
}

std::vector<Batch> BatchLoader::next() {
  if (queue_.empty()) order_ahead();
  if (queue_.empty()) return {};
  const auto step = std::move(queue_.front());
  queue_.pop_front();
  if (workers_.empty()) {
    make(*step);
  } else {
    order_ahead();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return step->done; });
  }
  if (step->failure) std::rethrow_exception(step->failure);
  position_ = step->position_after;
  return std::move(step->batches);
}

void BatchLoader::work() {
  const torch::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !to_do_.empty(); });
    if (stopping_) return;
    const auto step = std::move(to_do_.front());
    to_do_.pop_front();
    lock.unlock();
    make(*step);  // no other thread looks at a step that is neither in the list nor done
    lock.lock();
    step->done = true;
    changed_.notify_all();
  }
}

void BatchLoader::make(Step& step) const {
  try {
    for (const auto& indices : step.indices) {
      Batch batch = make_training_batch(data_, indices, seed_, step.epoch);
      if (options_.pinned) batch = {batch.images.pin_memory(), batch.labels.pin_memory()};
      step.batches.push_back(std::move(batch));
    }
  } catch (...) {
    step.failure = std::current_exception();
  }
}

}  // namespace examples
