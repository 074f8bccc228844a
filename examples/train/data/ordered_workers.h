#pragma once
/// OrderedWorkers are threads that do jobs side by side and whose results are taken in the order in which the jobs were given. One thread
/// gives jobs and takes results. They own the threads and the results that nobody has taken yet. What a job throws is thrown where its
/// result is taken.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace examples {

template <class Result>
class OrderedWorkers {
 public:
  /// With no threads take() does the jobs itself.
  explicit OrderedWorkers(std::size_t threads) {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  /// Waits for jobs that have been begun.
  ~OrderedWorkers() {
    drop();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  void order(std::function<Result()> job) {
    auto task = std::make_shared<Task>();
    task->job = std::move(job);
    ordered_.push_back(task);
    if (threads_.empty()) return;
    const std::lock_guard lock(mutex_);
    to_do_.push_back(std::move(task));
    changed_.notify_all();
  }

  /// Jobs whose results have not been taken.
  [[nodiscard]] std::size_t ordered() const { return ordered_.size(); }

  /// Blocks until the oldest job is done and returns its result. There must be one.
  Result take() {
    const auto task = std::move(ordered_.front());
    ordered_.pop_front();
    if (threads_.empty()) {
      task->run();
    } else {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return task->done; });
    }
    if (task->failure) std::rethrow_exception(task->failure);
    return std::move(*task->result);
  }

  /// Forgets all jobs. Those that have been begun end unseen.
  void drop() {
    ordered_.clear();
    const std::lock_guard lock(mutex_);
    to_do_.clear();
  }

 private:
  struct Task {
    std::function<Result()> job;
    std::optional<Result> result;
    std::exception_ptr failure;
    bool done = false;

    void run() {
      try {
        result.emplace(job());
      } catch (...) {
        failure = std::current_exception();
      }
    }
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !to_do_.empty(); });
      if (stopping_) return;
      const auto task = std::move(to_do_.front());
      to_do_.pop_front();
      lock.unlock();
      task->run();  // no other thread looks at a task that is neither in the list nor done
      lock.lock();
      task->done = true;
      changed_.notify_all();
    }
  }

  std::deque<std::shared_ptr<Task>> ordered_;  ///< of the calling thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> to_do_;  ///< guarded, like `done` of each
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace examples
