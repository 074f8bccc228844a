#include "tests/support/gpu/host_comm.h"

#include <algorithm>

namespace hvd::gpu::test {

HostComm::HostComm(HostCluster& cluster, const NcclUniqueId& id, int ranks, int own_rank,
                   bool is_blocking, Device device)
    : rank(own_rank),
      blocking(is_blocking),
      cluster_(cluster),
      group_(*cluster.join(id, ranks, own_rank)),
      device_(std::move(device)) {}

void HostComm::look_at(const std::string& call, bool may_be_busy) const {
  if (aborted_) cluster_.note(call + " on an aborted communicator");
  if (!may_be_busy && (busy_ > 0 || !is_settled()))
    cluster_.note(call + " on a communicator in progress");
}

NcclCode HostComm::poll() {
  bool over = true;
  if (!initialised_) {
    over = initialised_ = cluster_.complete(group_);
  } else if (awaits_window()) {
    over = cluster_.window_complete(group_, windows_);
    if (over) std::exchange(finish_window_, nullptr)();
  } else if (busy_ > 0) {
    over = --busy_ == 0;
    if (over) put_on_streams();
  }
  return over ? NcclCode::Success : NcclCode::InProgress;
}

void HostComm::wait_until_settled() {
  if (!initialised_) cluster_.wait_until_complete(group_);
  if (awaits_window()) cluster_.wait_for_window(group_, windows_);
  poll();
}

void HostComm::abort() {
  aborted_ = true;
  issued_.clear();
  cluster_.withdraw(group_, rank);
}

UseOfMemory HostComm::use_of(const Contribution& part) const {
  const std::size_t bytes = part.count * bytes_of_type(part.type);
  const bool is_broadcast = part.call == "ncclBroadcast";
  const bool is_source = is_broadcast && part.extra == rank;
  const bool writes =
      (part.call != "ncclReduce" || part.root == rank) && !(is_source && part.send == part.receive);
  UseOfMemory use{.name = text_of(part.call)};
  if (part.send != nullptr && (!is_broadcast || is_source))
    use.reads.push_back(
        {part.send, part.call == "ncclReduceScatter" ? bytes * group_.ranks : bytes});
  if (part.receive != nullptr && writes)
    use.writes.push_back(
        {part.receive, part.call == "ncclAllGather" ? bytes * group_.ranks : bytes});
  return use;
}

Contribution HostComm::collective(void* stream, Contribution part, const std::string& name) {
  part.send_place = place_of(part.send);
  part.receive_place = place_of(part.receive);
  UseOfMemory use = use_of(part);
  use.name = name;
  const std::uint64_t number = next_++;
  add(
      stream, std::move(use), part, false,
      [this, number] { return cluster_.has_met(group_, number); },
      [this, number](const Contribution& brought, Clock& clock) {
        return cluster_.meet(group_, number, rank, brought, clock);
      });
  return part;
}

void HostComm::message(void* stream, Contribution part, bool sends, int peer,
                       const std::string& name) {
  const std::pair<int, int> ends = sends ? std::pair(rank, peer) : std::pair(peer, rank);
  const HostCluster::CommGroup::Way way{ends.first, ends.second, messages_[ends]++};
  UseOfMemory use = use_of(part);
  use.name = name;
  add(
      stream, std::move(use), std::move(part), true,
      [this, way] { return cluster_.has_moved(group_, way); },
      [this, way, sends](const Contribution& brought, Clock& clock) {
        return cluster_.transfer(group_, way, sends, brought, clock);
      });
}

/// What has not met when a rank aborts never will, and ends all the same.
void HostComm::add(void* stream, UseOfMemory use, Contribution part, bool is_message,
                   const std::function<bool()>& is_over,
                   const std::function<bool(const Contribution& part, Clock& clock)>& meet) {
  part.send = device_.on_host(part.send);
  part.receive = device_.on_host(part.receive);
  const auto run = [this, part = std::move(part), writes = use.writes, is_over,
                    meet](Clock& clock) {
    const bool early = (aborted_ || cluster_.is_left(group_)) && !is_over();
    if (early)
      for (const MemoryRange& range : writes) device_.spoil(range);
    return early || aborted_ || meet(part, clock);
  };
  issued_.push_back({stream, std::move(use), run, is_message});
}

NcclCode HostComm::issue(int busy_polls) {
  busy_ = blocking ? 0 : busy_polls;
  if (busy_ > 0) return NcclCode::InProgress;
  put_on_streams();
  return NcclCode::Success;
}

void HostComm::put_on_streams() {
  std::map<void*, std::pair<UseOfMemory, std::vector<Run>>> together;
  for (auto& [stream, use, run, is_message] : std::exchange(issued_, {})) {
    if (!is_message) {
      device_.put(*this, stream, {.use = std::move(use), .run = std::move(run)});
      continue;
    }
    auto& [all, runs] = together[stream];
    all.name = use.name;
    all.reads.insert(all.reads.end(), use.reads.begin(), use.reads.end());
    all.writes.insert(all.writes.end(), use.writes.begin(), use.writes.end());
    runs.push_back(std::move(run));
  }
  for (auto& [stream, messages] : together) {
    const auto run = [left = std::move(messages.second)](Clock& clock) mutable {
      std::erase_if(left, [&](const Run& message) { return message(clock); });
      return left.empty();
    };
    device_.put(*this, stream, {.use = std::move(messages.first), .run = run});
  }
}

void HostComm::add_place(const void* memory, std::size_t bytes, const std::string& name,
                         void* handle) {
  places_[static_cast<const std::byte*>(memory)] = {bytes, name, handle};
}
bool HostComm::drop_place(const void* handle) {
  return std::erase_if(places_, [&](const auto& one) { return one.second.handle == handle; }) == 1;
}
bool HostComm::has_place(const void* memory) const {
  return places_.contains(static_cast<const std::byte*>(memory));
}

void HostComm::open_window(const void* memory, std::size_t bytes, std::function<void*()> finish) {
  cluster_.open_window(group_, ++windows_, rank, bytes);
  finish_window_ = [this, memory, bytes, finish = std::move(finish)] {
    if (void* const handle = finish(); handle != nullptr)
      add_place(memory, bytes, "window " + std::to_string(windows_), handle);
  };
}

StateText HostComm::place_of(const void* memory) const {
  const auto* at = static_cast<const std::byte*>(memory);
  for (const auto& [begin, place] : places_)
    if (begin <= at && at < begin + place.bytes)
      return StateText(place.name + " at " + std::to_string(at - begin));
  return {};
}

}  // namespace hvd::gpu::test
