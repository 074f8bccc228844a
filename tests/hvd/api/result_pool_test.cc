/// The pool of results' memory: what comes back, what is given back to the system, and blocks that
/// outlive it.
#include "hvd/api/result_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

namespace hvd::test {
namespace {

constexpr std::size_t kMiB = 1 << 20;

/// Counts what is out, and refuses beyond `room`.
class CountedMemory final : public ResultMemory {
 public:
  explicit CountedMemory(std::size_t room) : room_(room) {}
  ~CountedMemory() override { CHECK(out_ == 0); }
  std::byte* allocate(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (out_ + bytes > room_) return nullptr;
    out_ += bytes;
    ++allocations_;
    return static_cast<std::byte*>(std::aligned_alloc(4096, bytes));
  }
  void give_back(std::byte* block, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    out_ -= bytes;
    std::free(block);
  }
  std::size_t out() const {
    const std::lock_guard lock(mutex_);
    return out_;
  }
  int allocations() const {
    const std::lock_guard lock(mutex_);
    return allocations_;
  }

 private:
  const std::size_t room_;
  mutable std::mutex mutex_;
  std::size_t out_ = 0;
  int allocations_ = 0;
};

struct Pool {
  explicit Pool(std::size_t kept, std::size_t all = 64 * kMiB, std::size_t room = 1024 * kMiB)
      : memory(std::make_shared<CountedMemory>(room)),
        pool(std::make_shared<ResultPool>(memory, ResultPool::Limits{kept, all})) {}
  std::shared_ptr<CountedMemory> memory;
  std::shared_ptr<ResultPool> pool;
};

}  // namespace

TEST_CASE("result pool: a block comes back for the next result of about its size") {
  const Pool made(8 * kMiB);
  auto first = made.pool->allocate(2 * kMiB);
  void* const place = first.get();
  CHECK(made.pool->kept_bytes() == 0);
  first.reset();
  CHECK(made.pool->kept_bytes() == 2 * kMiB);
  CHECK(made.pool->allocate(2 * kMiB - 100).get() == place);
  CHECK(made.pool->allocate(2 * kMiB - kMiB / 4).get() == place);
  CHECK(made.pool->allocate(kMiB).get() != place);  // half of it would lie idle
  CHECK(made.pool->allocate(2 * kMiB + 1).get() != place);
  CHECK(made.memory->allocations() == 3);
  const auto a = made.pool->allocate(2 * kMiB), b = made.pool->allocate(2 * kMiB);
  CHECK(a.get() != b.get());
  CHECK(made.pool->allocate(ResultPool::kLeastBytes - 1) == nullptr);
  CHECK(made.pool->allocate(8 * kMiB + 1) == nullptr);
  CHECK(made.pool->allocate(0) == nullptr);
}

TEST_CASE("result pool: what is beyond the bound goes back to the system, the oldest first") {
  const Pool made(4 * kMiB);
  auto a = made.pool->allocate(kMiB), b = made.pool->allocate(2 * kMiB),
       c = made.pool->allocate(3 * kMiB);
  CHECK(made.memory->out() == 6 * kMiB);
  a.reset();
  b.reset();
  CHECK(made.memory->out() == 6 * kMiB);
  c.reset();
  CHECK(made.pool->kept_bytes() == 3 * kMiB);
  CHECK(made.memory->out() == 3 * kMiB);
  c = made.pool->allocate(3 * kMiB);
  CHECK(made.memory->allocations() == 3);
  b = made.pool->allocate(2 * kMiB);
  CHECK(made.memory->allocations() == 4);
}

TEST_CASE("result pool: results that are held leave the rest of the memory to others") {
  const Pool made(4 * kMiB, 10 * kMiB);
  std::vector<std::shared_ptr<void>> held;
  for (int i = 0; i < 5; ++i) held.push_back(made.pool->allocate(2 * kMiB));
  CHECK(held.back() != nullptr);
  CHECK(made.pool->allocate(2 * kMiB) == nullptr);
  held.resize(3);
  CHECK(made.pool->kept_bytes() == 4 * kMiB);
  CHECK(made.pool->allocate(3 * kMiB) != nullptr);  // in the place of what was kept
  CHECK(made.memory->out() <= 10 * kMiB);
  CHECK(made.pool->allocate(4 * kMiB) != nullptr);
  CHECK(made.pool->allocate(4 * kMiB + 1) == nullptr);
}

TEST_CASE(
    "result pool: where the memory is full, what is kept makes room, and then there is none") {
  const Pool made(4 * kMiB, 64 * kMiB, 4 * kMiB);
  made.pool->allocate(2 * kMiB).reset();
  CHECK(made.pool->kept_bytes() == 2 * kMiB);
  auto larger = made.pool->allocate(3 * kMiB);
  CHECK(larger != nullptr);
  CHECK(made.pool->kept_bytes() == 0);
  CHECK(made.pool->allocate(2 * kMiB) == nullptr);
  larger.reset();
  CHECK(made.pool->allocate(3 * kMiB) != nullptr);
}

TEST_CASE("result pool: blocks outlive it, and end in any thread") {
  std::optional<Pool> made(4 * kMiB);
  const auto memory = made->memory;
  auto held = made->pool->allocate(kMiB);
  std::memset(held.get(), 7, kMiB);
  made->pool->allocate(2 * kMiB).reset();
  CHECK(memory->out() == 3 * kMiB);
  made.reset();
  CHECK(memory->out() == kMiB);
  CHECK(static_cast<std::byte*>(held.get())[kMiB - 1] == std::byte{7});
  std::thread([&] { held.reset(); }).join();
  CHECK(memory->out() == 0);
}

TEST_CASE("result pool: many threads at once never have one block twice") {
  const Pool made(8 * kMiB, 24 * kMiB);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::shared_ptr<void>> held(4);
      for (int i = 0; i < 2000; ++i) {
        auto& one = held[random() % held.size()];
        if (one && *static_cast<unsigned*>(one.get()) != t) ++wrong;
        one = made.pool->allocate(ResultPool::kLeastBytes + random() % (2 * kMiB));
        if (one) *static_cast<unsigned*>(one.get()) = t;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(made.pool->kept_bytes() <= 8 * kMiB);
  CHECK(made.memory->out() == made.pool->kept_bytes());
}

}  // namespace hvd::test
