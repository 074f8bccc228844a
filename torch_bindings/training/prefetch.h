#pragma once
/// A PrefetchedLoader reads a data loader ahead, on a thread of its own, and has the batches on the
/// device by the time they are asked for: they are copied to pinned memory, and from there on a
/// stream of its own while the model is at work on the batch before. On the CPU it only reads
/// ahead.
///
///     auto batches = hvd::prefetch_to_device(loader, hvd::local_device());
///     for (auto& batch : batches) train(batch.data, batch.target);
///
/// The loader is LibTorch's or anything else with `begin()` and `end()`; its batches are tensors,
/// torch::data::Example, and what is made of them by vector, tuple, optional, map...; everything
/// else in them stays as it is. Order and number of batches are the loader's. What the loader
/// throws is thrown to the consumer in the place of that batch, after those before it; then the
/// epoch is over.
///
/// Each `begin()` starts an epoch, and ends the one before, whose reader it waits for. (A LibTorch
/// loader with workers refuses, with c10::Error, a `begin()` before its last epoch has been read to
/// the end, with or without this.) The reader ends, and is waited for, when the epoch's iterators
/// are gone, so a loop may be left in the middle; at most `depth` batches have then been read in
/// vain. An ElasticSampler counts as used what `record_batch()` says: record batches that the loop
/// has got, and what was only read ahead comes again after a restart.
///
/// One thread uses it. Its reader alone touches the loader between `begin()` and the end of the
/// epoch. It keeps up to `depth` batches, and refers to the loader, which must outlive it, unless
/// it was given it as an rvalue std::unique_ptr.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/data/iterator.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/tensor_structure.h"

#pragma GCC visibility push(default)
namespace hvd {

namespace detail {

class StreamEvent;

/// Copies to a device on a stream of its own.
class DeviceFeed {
 public:
  /// Throws InvalidArgument where there is no such device.
  explicit DeviceFeed(at::Device device);
  [[nodiscard]] bool is_idle() const { return !stream_; }
  /// For the reader: puts what is on the device in the places of these tensors, and says when.
  std::shared_ptr<StreamEvent> send(const std::vector<at::Tensor*>& tensors);
  /// For the consumer: its current stream waits for that, and keeps the memory.
  void receive(const StreamEvent& sent, const std::vector<at::Tensor*>& tensors);

 private:
  std::optional<c10::Stream> stream_;  ///< none on the CPU
};

/// One epoch of a loader that is read ahead.
template <class Loader>
class PrefetchedEpoch {
 public:
  using Batch = std::remove_cvref_t<decltype(*std::declval<Loader&>().begin())>;

  PrefetchedEpoch(Loader& loader, std::shared_ptr<DeviceFeed> feed, std::size_t depth)
      : feed_(std::move(feed)),
        depth_(depth),
        next_(loader.begin()),
        end_(loader.end()),
        reader_([this, world = World::current()] { world.run([this] { read(); }); }) {}
  ~PrefetchedEpoch() { stop(); }

  /// Nothing more is read, and nothing more is given.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    if (reader_.joinable()) reader_.join();
  }
  std::optional<Batch> next() {
    Item item;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !ready_.empty() || ended_ || stopped_; });
      if (stopped_ || ready_.empty()) return std::nullopt;
      item = std::move(ready_.front());
      ready_.pop_front();
    }
    changed_.notify_all();
    if (item.failure) std::rethrow_exception(item.failure);
    if (item.sent) feed_->receive(*item.sent, tensors_of(*item.batch));
    return std::move(item.batch);
  }

 private:
  struct Item {
    std::optional<Batch> batch;
    std::shared_ptr<StreamEvent> sent;
    std::exception_ptr failure;
  };
  static std::vector<at::Tensor*> tensors_of(Batch& batch) {
    std::vector<at::Tensor*> all;
    visit_tensors(batch, [&all](at::Tensor& tensor) { all.push_back(&tensor); });
    return all;
  }
  void read() {
    Item last;
    try {
      for (bool first = true;; first = false) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [this] { return stopped_ || ready_.size() < depth_; });
          if (stopped_) return;
        }
        if (!first) ++next_;
        if (next_ == end_) break;
        Item item{.batch = *next_};
        if (!feed_->is_idle()) item.sent = feed_->send(tensors_of(*item.batch));
        const std::lock_guard lock(mutex_);
        ready_.push_back(std::move(item));
        changed_.notify_all();
      }
    } catch (...) {
      last.failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (last.failure) ready_.push_back(std::move(last));
    ended_ = true;
    changed_.notify_all();
  }

  const std::shared_ptr<DeviceFeed> feed_;
  const std::size_t depth_;
  decltype(std::declval<Loader&>().begin()) next_;
  decltype(std::declval<Loader&>().end()) end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> ready_;
  bool ended_ = false, stopped_ = false;
  std::thread reader_;  ///< last: it uses all the others
};

}  // namespace detail

/// A PrefetchedLoader is what prefetch_to_device() returns.
template <class Loader>
class PrefetchedLoader {
 public:
  /// The type of the loader's batches.
  using Batch = typename detail::PrefetchedEpoch<Loader>::Batch;
  /// Makes it around a loader; prefetch_to_device() does it.
  PrefetchedLoader(std::shared_ptr<Loader> loader, at::Device device, std::size_t depth)
      : loader_(std::move(loader)),
        feed_(std::make_shared<detail::DeviceFeed>(device)),
        depth_(depth) {
    if (depth == 0)
      throw InvalidArgument(
          "prefetch_to_device: a depth of 0 reads nothing ahead; give 1 at least");
  }

  /// Starts an epoch. Throws what the loader's `begin()` throws.
  torch::data::Iterator<Batch> begin() {
    if (const auto before = epoch_.lock()) before->stop();
    const auto epoch = std::make_shared<detail::PrefetchedEpoch<Loader>>(*loader_, feed_, depth_);
    epoch_ = epoch;
    return torch::data::Iterator<Batch>(std::make_unique<torch::data::detail::ValidIterator<Batch>>(
        [epoch, loader = loader_] { return epoch->next(); }));
  }
  /// Returns what an iterator is equal to when the epoch is over.
  torch::data::Iterator<Batch> end() {
    return torch::data::Iterator<Batch>(
        std::make_unique<torch::data::detail::SentinelIterator<Batch>>());
  }

 private:
  std::shared_ptr<Loader> loader_;
  std::shared_ptr<detail::DeviceFeed> feed_;
  std::size_t depth_;
  std::weak_ptr<detail::PrefetchedEpoch<Loader>> epoch_;
};

/// @{
/// Reads `loader` ahead by up to `depth` batches, and copies them to `device`; a device without an
/// index is this thread's current one. Local. Throws InvalidArgument for a depth of 0, and where
/// there is no such device. The loader stays the caller's unless it is moved in.
template <class Loader>
requires requires(Loader& loader) {
  loader.begin();
  loader.end();
}
PrefetchedLoader<Loader> prefetch_to_device(Loader& loader, at::Device device,
                                            std::size_t depth = 2) {
  return {std::shared_ptr<Loader>(std::shared_ptr<void>(), &loader), device, depth};
}
template <class Loader>
PrefetchedLoader<Loader> prefetch_to_device(std::unique_ptr<Loader>& loader, at::Device device,
                                            std::size_t depth = 2) {
  return prefetch_to_device(*loader, device, depth);
}
template <class Loader>
PrefetchedLoader<Loader> prefetch_to_device(std::unique_ptr<Loader>&& loader, at::Device device,
                                            std::size_t depth = 2) {
  return {std::shared_ptr<Loader>(std::move(loader)), device, depth};
}
/// @}

}  // namespace hvd
#pragma GCC visibility pop
