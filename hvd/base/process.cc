#include "hvd/base/process.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>

namespace hvd {

namespace detail {
std::atomic<int> forked_from{kNotForked};
std::atomic<unsigned> process{0};
}  // namespace detail

namespace {

constexpr int kNoRank = -1;
std::atomic<int> own_rank{kNoRank};
std::atomic<bool> was_in_some_world{false};

/// Runs in the child, whose only thread is the one that called fork().
void note_fork() {
  detail::process.fetch_add(1, std::memory_order_relaxed);
  if (const int rank = own_rank.load(std::memory_order_relaxed); rank != kNoRank)
    detail::forked_from.store(rank, std::memory_order_relaxed);
}
[[maybe_unused]] const int watched = ::pthread_atfork(nullptr, nullptr, note_fork);

}  // namespace

void become_rank(int rank) noexcept { own_rank.store(rank, std::memory_order_relaxed); }

void become_rank_of_some_world(int rank) noexcept {
  int none = kNoRank;
  was_in_some_world.store(true, std::memory_order_relaxed);
  own_rank.compare_exchange_strong(none, rank, std::memory_order_relaxed);
}

void cease_to_be_rank() noexcept {
  if (!was_in_some_world.load(std::memory_order_relaxed))
    own_rank.store(kNoRank, std::memory_order_relaxed);
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

const char* describe_fork() noexcept {
  static thread_local std::array<char, 256> text;
  std::snprintf(text.data(), text.size(),
                "this process was forked from rank %d and is no rank: hvd and MPI work in the "
                "process that called hvd::init() only; start programs by posix_spawn or fork() and "
                "exec(), and fork workers before hvd::init()",
                detail::forked_from.load(std::memory_order_relaxed));
  return text.data();
}

}  // namespace hvd
