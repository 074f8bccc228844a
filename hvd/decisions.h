#pragma once
/// This file has what ranks decide or do in turn, so that all of them go on alike: whether any of
/// them says yes, who goes first, how a batch is shared out. Any thread; nothing is kept. All but
/// share_of_batch() are collective over the process set, and throw what a collective throws
/// (Mismatch, RankFailed, Shutdown...) beside what they say themselves.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "hvd/options.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Returns whether `mine` is true on at least one rank of the set: the same on all of them, so that
/// they can branch on it (early stopping, a loss that is not finite, a signal). Collective; costs
/// an allreduce of one byte. A rank that has joined says no. Throws InvalidArgument on a rank
/// outside the set.
[[nodiscard]] bool any(bool mine, const ProcessSet& process_set = {});

/// RankZeroFirstOptions are those of rank_zero_first; equal on all ranks.
struct RankZeroFirstOptions {
  /// True: one rank of each host goes first (its lowest in the set), for what is put on a disk of
  /// the host. False: the set's first rank does.
  bool per_host = false;
  ProcessSet process_set{};  ///< the ranks that take part
};

namespace detail {
/// Calls `call` on the first ranks, and then on the others.
void let_first_go(const std::function<void()>& call, const RankZeroFirstOptions& options);
}  // namespace detail

/// Calls `call` on rank 0, and when it has returned there on all others, at the same time; returns
/// what it returns on this rank. For what one rank prepares and the others then find: a data set
/// that is downloaded, a cache that is filled. Collective; `call` must not be: it makes no
/// collective call itself. While they wait, HVD_STALL_CHECK_TIME_SECONDS may warn, and
/// HVD_STALL_SHUTDOWN_TIME_SECONDS end the world, if that is set. If `call` throws on a rank that
/// goes first, it throws this on that rank, and RankFailed, with its words, on all others: those
/// that do not go first do not call it; what it throws on a later rank is that rank's alone. Throws
/// InvalidArgument on a rank outside the set.
template <class Call>
auto rank_zero_first(Call&& call, const RankZeroFirstOptions& options = {})
    -> std::invoke_result_t<Call&> {
  using Result = std::invoke_result_t<Call&>;
  if constexpr (std::is_void_v<Result>) {
    detail::let_first_go([&call] { call(); }, options);
  } else if constexpr (std::is_reference_v<Result>) {
    std::remove_reference_t<Result>* result = nullptr;
    detail::let_first_go([&] { result = &call(); }, options);
    return static_cast<Result>(*result);
  } else {
    std::optional<Result> result;
    detail::let_first_go([&] { result.emplace(call()); }, options);
    return std::move(*result);
  }
}

/// Returns this rank's share of a batch of `items` that all ranks of the set make together: items /
/// size, and one more on the first items % size ranks, so that none is left out: 22, 21 and 21
/// of 64. Local: the same on all ranks that give the same number. Throws InvalidArgument, so on all
/// of them, where a rank would have no item, and on a rank outside the set. Where shares differ, an
/// average over the ranks counts every rank alike: DistributedOptimizer::set_weight() makes it one
/// over items. Ranks with different batches need equal numbers of them: count steps (data set /
/// items), or use join().
[[nodiscard]] std::size_t share_of_batch(std::int64_t items, const ProcessSet& process_set = {});

}  // namespace hvd
#pragma GCC visibility pop
