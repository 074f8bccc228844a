#include "ops/shm/context.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hvd/base/futex.h"

namespace hvd {

namespace {

constexpr auto kLinger = std::chrono::microseconds(100);
constexpr int kYields = 20;

}  // namespace

ShmContext::ShmContext(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology)
    : topology_(std::move(topology)),
      staging_(std::move(memory), std::move(arena), topology_.domain_index),
      board_(board),
      has_cores_(topology_.domain_ranks.size() <= std::thread::hardware_concurrency()) {}

int ShmContext::domain_index(int rank) const {
  const auto& ranks = topology_.domain_ranks;
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

bool ShmContext::linger(const BatchState& batch) const {
  const auto is_complete = [&] { return batch.complete.load(std::memory_order_acquire); };
  const auto until = std::chrono::steady_clock::now() + kLinger;
  for (int turn = 0; !is_complete() && std::chrono::steady_clock::now() < until; ++turn) {
    if (has_cores_) {
      cpu_relax();
    } else if (turn < kYields) {
      std::this_thread::yield();  // the one awaited may be the next to run here
    } else {
      break;
    }
  }
  return is_complete();
}

std::byte* ShmContext::scratch(std::size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

}  // namespace hvd
