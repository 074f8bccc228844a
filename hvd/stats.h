#pragma once
/// This file has the counters of one rank since `init()`. The engine and the backends add, any
/// thread reads. They are relaxed atomics: each is exact, but they are not read at one instant.
// Tested in tests/hvd/api/burst_mpi_test.cc, tests/contract/cases/fusion_cases.cc

#include <array>
#include <atomic>
#include <cstdint>

#pragma GCC visibility push(default)
namespace hvd {

/// Stats are the counters as `hvd::stats()` has read them.
struct Stats {
  std::uint64_t tensors_submitted = 0;     ///< members of groups each
  std::uint64_t batches_run = 0;           ///< batches that this rank took part in
  std::uint64_t tensors_fused = 0;         ///< tensors that shared their batch with another
  std::uint64_t bytes_reduced = 0;         ///< of this rank's inputs to allreduce and reducescatter
  std::uint64_t negotiation_rounds = 0;    ///< agreements this rank took part in
  std::uint64_t bytes_to_other_hosts = 0;  ///< of tensors, sent by this rank
  std::uint64_t bytes_zero_copy = 0;  ///< of tensors that were worked on where the user keeps them
};

/// StatsCounters are what the engine and the backends add to.
struct StatsCounters {
  /// @{
  /// Counts what the field of Stats has that is called so.
  std::atomic<std::uint64_t> tensors_submitted{0}, batches_run{0}, tensors_fused{0},
      bytes_reduced{0}, negotiation_rounds{0}, bytes_to_other_hosts{0}, bytes_zero_copy{0};

  /// @}

  /// Counts the batches and rounds that took each way, by its number (hvd/routes.h).
  std::array<std::atomic<std::uint64_t>, 16> routes{};
  /// Counts them by how ranks got at each other's inputs, by its number, likewise.
  std::array<std::atomic<std::uint64_t>, 8> accesses{};

  /// Adds `amount` to one of the counters.
  void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
    counter.fetch_add(amount, std::memory_order_relaxed);
  }

  /// FastPathCounters are what the fast path adds to, which are the same fields again: under a
  /// lock, so that no addition has to be atomic.
  struct FastPathCounters {
    /// @{
    /// Counts what the field of Stats has that is called so.
    std::atomic<std::uint64_t> tensors_submitted{0}, batches_run{0}, tensors_fused{0},
        bytes_reduced{0}, negotiation_rounds{0};

    /// @}

    /// @{
    /// Counts rounds as the field of StatsCounters does that is called so.
    decltype(StatsCounters::routes) routes{};
    decltype(StatsCounters::accesses) accesses{};
    /// @}

    /// Adds `amount` to one of the counters. One thread at a time.
    static void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
      counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
    }
  };
  FastPathCounters fast_path;  ///< written under the engine's mutex

  /// Returns what the counters are now.
  [[nodiscard]] Stats read() const {
    constexpr auto relaxed = std::memory_order_relaxed;
    return {tensors_submitted.load(relaxed) + fast_path.tensors_submitted.load(relaxed),
            batches_run.load(relaxed) + fast_path.batches_run.load(relaxed),
            tensors_fused.load(relaxed) + fast_path.tensors_fused.load(relaxed),
            bytes_reduced.load(relaxed) + fast_path.bytes_reduced.load(relaxed),
            negotiation_rounds.load(relaxed) + fast_path.negotiation_rounds.load(relaxed),
            bytes_to_other_hosts.load(relaxed),
            bytes_zero_copy.load(relaxed)};
  }
};

}  // namespace hvd
#pragma GCC visibility pop
