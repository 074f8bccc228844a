#include "hvd/decisions.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/hvd.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

void check_included(const ProcessSet& process_set, std::string_view what) {
  if (!process_set.included())
    throw InvalidArgument(
        formatted("{}: this rank is not in process set {}", what, process_set.id()));
}

/// Returns whether this rank is the lowest of the set on its host. Collective.
bool is_first_of_host(const ProcessSet& process_set) {
  std::int64_t host = cross_rank();
  const auto gathered =
      allgather({&host, DataType::Int64, {1}},
                {.name = library_name("rank_zero_first/hosts"), .process_set = process_set});
  std::vector<std::int64_t> hosts(gathered.data.size() / sizeof(std::int64_t));
  std::memcpy(hosts.data(), gathered.data.data(), gathered.data.size());
  const auto own = hosts.begin() + process_set.rank();
  return std::find(hosts.begin(), own, host) == own;
}

/// Returns `mine` of all ranks, one after the other: empty if all went well. A rank says it when it
/// has gone first, or does nothing before the others. Collective.
std::string said_by_first_to_fail(std::string mine, const ProcessSet& process_set) {
  const auto gathered =
      allgather({mine.data(), DataType::UInt8, {static_cast<std::int64_t>(mine.size())}},
                {.name = library_name("rank_zero_first"), .process_set = process_set});
  return {reinterpret_cast<const char*>(gathered.data.data()), gathered.data.size()};
}

std::string words_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

}  // namespace

bool any(bool mine, const ProcessSet& process_set) {
  check_included(process_set, "any()");
  std::uint8_t said = mine ? 1 : 0;
  const Buffer buffer{&said, DataType::UInt8, {1}};
  allreduce(buffer, buffer,
            {.name = library_name("any"), .op = ReduceOp::Max, .process_set = process_set});
  return said != 0;
}

void detail::let_first_go(const std::function<void()>& call, const RankZeroFirstOptions& options) {
  check_included(options.process_set, "rank_zero_first()");
  const bool first =
      options.per_host ? is_first_of_host(options.process_set) : options.process_set.rank() == 0;
  std::exception_ptr failure;
  std::string words;
  if (first) {
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
      words = formatted("rank_zero_first(): rank {} threw: {}\n", rank(), words_of(failure));
    }
  }
  const std::string said = said_by_first_to_fail(std::move(words), options.process_set);
  if (failure) std::rethrow_exception(failure);
  if (!said.empty()) throw RankFailed(said.substr(0, said.size() - 1));
  if (!first) call();
}

std::size_t share_of_batch(std::int64_t items, const ProcessSet& process_set) {
  check_included(process_set, "share_of_batch()");
  const std::int64_t ranks = process_set.size();
  if (items < ranks)
    throw InvalidArgument(
        formatted("share_of_batch({}): {} ranks cannot share {} items, each needs one at least; "
                  "take a larger batch or fewer ranks",
                  items, ranks, items));
  return static_cast<std::size_t>(items / ranks + (process_set.rank() < items % ranks ? 1 : 0));
}

}  // namespace hvd
