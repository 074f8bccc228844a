#pragma once
/// Counters since `init()`. The engine and the backends add; anyone reads. Relaxed atomics: each is exact, but they are
/// not read at one instant.

#include <atomic>
#include <cstdint>

namespace hvd {

struct Stats {
  std::uint64_t tensors_submitted = 0;
  std::uint64_t batches_run = 0;
  std::uint64_t tensors_fused = 0;       ///< tensors that shared their batch with another
  std::uint64_t bytes_reduced = 0;       ///< of this rank's inputs to allreduce and reducescatter
  std::uint64_t negotiation_rounds = 0;  ///< agreements this rank took part in
  std::uint64_t bytes_to_other_hosts = 0;
  std::uint64_t bytes_zero_copy = 0;  ///< of tensors that were worked on where the user keeps them
};

struct StatsCounters {
  std::atomic<std::uint64_t> tensors_submitted{0}, batches_run{0}, tensors_fused{0}, bytes_reduced{0}, negotiation_rounds{0},
      bytes_to_other_hosts{0}, bytes_zero_copy{0};

  void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) { counter.fetch_add(amount, std::memory_order_relaxed); }
  [[nodiscard]] Stats read() const {
    return {tensors_submitted.load(std::memory_order_relaxed),  batches_run.load(std::memory_order_relaxed),
            tensors_fused.load(std::memory_order_relaxed),      bytes_reduced.load(std::memory_order_relaxed),
            negotiation_rounds.load(std::memory_order_relaxed), bytes_to_other_hosts.load(std::memory_order_relaxed),
            bytes_zero_copy.load(std::memory_order_relaxed)};
  }
};

}  // namespace hvd
