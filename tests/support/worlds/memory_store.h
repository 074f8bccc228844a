#pragma once
/// A store of keys in this process, for worlds whose members are threads of it.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "tests/support/worlds/rendezvous.h"

namespace hvd::test {

class MemoryStore {
 public:
  void set(const std::string& key, Rendezvous::Value value) {
    const std::lock_guard lock(mutex_);
    ++requests_;
    values_[key] = std::move(value);
    changed_.notify_all();
  }
  std::optional<Rendezvous::Value> get(const std::string& key, std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    ++requests_;
    if (!changed_.wait_for(lock, time, [&] { return values_.contains(key); })) return std::nullopt;
    return values_.at(key);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) {
    const std::lock_guard lock(mutex_);
    ++requests_;
    return numbers_[key] += amount;
  }
  [[nodiscard]] int requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Rendezvous::Value> values_;
  std::map<std::string, std::int64_t> numbers_;
  int requests_ = 0;
};

}  // namespace hvd::test
