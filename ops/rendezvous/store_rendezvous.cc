#include "ops/rendezvous/store_rendezvous.h"

#include <unistd.h>

#include <array>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kGraceOfDead = 1s;

}  // namespace

std::string name_of_host() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return formatted("{} {}", name.data(), Peers::name_of_process_space());
}

StoreRendezvous::StoreRendezvous(int rank, int size, std::unique_ptr<StoreServer> server, StoreClient client)
    : rank_(rank), size_(size), server_(std::move(server)), client_(std::move(client)) {
  peers_.watch(allgather(Peers::introduce()), rank_);
}

void StoreRendezvous::begin() {
  if (!broken().empty()) throw BackendError(formatted("hvd::init(): the ranks cannot meet any more: {}", broken()));
  // A gift that somebody no longer waited for lies in the store for ever. No other world may take it for one of its own.
  const std::lock_guard lock(one_at_a_time_);
  world_ = exchanges_;
  gifts_.clear();
}

void StoreRendezvous::look_for_dead() {
  // The store sees connections end. Those of a rank that was forked outlive it, in its children.
  if (!dead_) {
    if (const auto found = peers_.find_dead()) dead_ = {*found, Clock::now() + kGraceOfDead};
  } else if (Clock::now() > dead_->second) {
    throw RankFailed(formatted("rank {} has ended while others wait for it in hvd::init() or hvd::shutdown()", dead_->first));
  }
}

std::vector<Bytes> StoreRendezvous::allgather(const Bytes& mine) {
  const std::lock_guard lock(one_at_a_time_);
  auto all = client_.allgather(mine, size_, [this] { look_for_dead(); });
  ++exchanges_;
  return all;
}

std::vector<int> StoreRendezvous::find_hosts() {
  std::map<std::string, int> first;
  std::vector<int> hosts;
  const auto all = allgather(Writer().put_string(name_of_host()).take());
  for (int rank = 0; rank < size_; ++rank)
    hosts.push_back(first.emplace(Reader(all[static_cast<std::size_t>(rank)]).get_string(), rank).first->second);
  return hosts;
}

Bytes StoreRendezvous::give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag, const std::function<bool()>& give_up) {
  if (ranks.size() < 2) return mine;
  const std::lock_guard lock(one_at_a_time_);
  int& count = gifts_[{ranks, tag}];
  const std::string key = formatted("{} {} {} {}", world_, joined(ranks, ","), tag, count);
  if (rank_ == ranks.front()) {
    client_.put(key, mine, static_cast<int>(ranks.size()) - 1);
    ++count;
    return mine;
  }
  auto given = client_.get(key, give_up);
  if (!given) throw BackendError(formatted("rank {} waited in vain for what rank {} has to give", rank_, ranks.front()));
  ++count;
  return std::move(*given);
}

}  // namespace hvd
