#include "tests/support/host_cluster.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {

namespace {

DataType host_type(NcclType type) {
  switch (type) {
    case NcclType::Int8: return DataType::Int8;
    case NcclType::Uint8: return DataType::UInt8;
    case NcclType::Int32: return DataType::Int32;
    case NcclType::Int64: return DataType::Int64;
    case NcclType::Float16: return DataType::Float16;
    case NcclType::Bfloat16: return DataType::BFloat16;
    case NcclType::Float32: return DataType::Float32;
    default: return DataType::Float64;
  }
}

/// In the type itself, as NCCL does: rounded after every step, integers wrapping.
template <class T>
T reduced_on_host(T a, T b, NcclOp op) {
  if constexpr (kInteger<T>) {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    if (op == NcclOp::Prod) return static_cast<T>(x * y);
    if (op == NcclOp::Min) return std::min(a, b);
    if (op == NcclOp::Max) return std::max(a, b);
    return static_cast<T>(x + y);
  } else {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    if (op == NcclOp::Prod) return static_cast<T>(x * y);
    if (op == NcclOp::Min) return static_cast<T>(std::min(x, y));
    if (op == NcclOp::Max) return static_cast<T>(std::max(x, y));
    return static_cast<T>(x + y);
  }
}

/// Allreduce, reduce and reducescatter.
void reduce_on_host(const std::vector<Contribution>& ranks) {
  const StateText& call = ranks[0].call;
  const std::size_t own = ranks[0].count;
  const std::size_t count = call == "ncclReduceScatter" ? own * ranks.size() : own;
  with_host_type(host_type(ranks[0].type), [&](auto tag) {
    using T = typename decltype(tag)::Native;
    const auto op = static_cast<NcclOp>(ranks[0].extra);
    for (std::size_t i = 0; i < count; ++i) {
      const auto input = [&](const Contribution& rank) {
        const T value = static_cast<const T*>(rank.send)[i];
        if constexpr (!kInteger<T>) {
          if (op == NcclOp::Avg)
            return reduced_on_host(value, static_cast<T>(1.0 / static_cast<double>(ranks.size())),
                                   NcclOp::Prod);
        }
        return value;
      };
      T result = input(ranks[0]);
      for (std::size_t r = 1; r < ranks.size(); ++r)
        result = reduced_on_host(result, input(ranks[r]), op);
      const auto write = [&](const Contribution& rank, std::size_t place) {
        static_cast<T*>(rank.receive)[place] = result;
      };
      if (call == "ncclReduce") {
        write(ranks[static_cast<std::size_t>(ranks[0].root)], i);
      } else if (call == "ncclReduceScatter") {
        write(ranks[i / own], i % own);
      } else {
        for (const Contribution& rank : ranks) write(rank, i);
      }
    }
  });
}

void move_on_host(const std::vector<Contribution>& ranks) {
  const std::size_t bytes = ranks[0].count * element_bytes(host_type(ranks[0].type));
  if (ranks[0].call == "ncclBroadcast") {
    const Contribution& root = ranks[static_cast<std::size_t>(ranks[0].extra)];
    for (const Contribution& rank : ranks) std::memmove(rank.receive, root.send, bytes);
    return;
  }
  for (const Contribution& rank : ranks) {
    for (std::size_t r = 0; r < ranks.size(); ++r)
      std::memmove(static_cast<char*>(rank.receive) + r * bytes, ranks[r].send, bytes);
  }
}

}  // namespace

std::size_t bytes_of_type(NcclType type) { return element_bytes(host_type(type)); }

HostCluster::HostCluster() = default;
HostCluster::~HostCluster() = default;

NcclUniqueId HostCluster::new_id() {
  const std::lock_guard lock(mutex_);
  NcclUniqueId id;
  const int number = ++ids_;
  std::memcpy(id.bytes.data(), &number, sizeof number);
  return id;
}

HostCluster::CommGroup* HostCluster::join(const NcclUniqueId& id, int ranks, int rank) {
  const std::lock_guard lock(mutex_);
  CommGroup& comm_group = comm_groups_[StateText(id.bytes.data(), id.bytes.size())];
  comm_group.ranks = static_cast<std::size_t>(ranks);
  if (!comm_group.joined.insert(rank).second)
    note_locked("rank " + std::to_string(rank) + " joined twice");
  joined_.notify_all();
  return &comm_group;
}

bool HostCluster::complete(const CommGroup& comm_group) {
  const std::lock_guard lock(mutex_);
  return comm_group.joined.size() == comm_group.ranks;
}

void HostCluster::wait_until_complete(const CommGroup& comm_group) {
  std::unique_lock lock(mutex_);
  joined_.wait(lock, [&] { return comm_group.joined.size() == comm_group.ranks; });
}

void HostCluster::SharedEvent::happen(std::uint64_t turn, const Clock& clock) {
  constexpr std::size_t kKept = 256;
  const std::lock_guard lock(mutex_);
  clocks_[turn] = clock;
  if (clocks_.size() > kKept) clocks_.erase(clocks_.begin());
  happened = turn;
}

Clock HostCluster::SharedEvent::clock_of(std::uint64_t turn) const {
  const std::lock_guard lock(mutex_);
  const auto found = clocks_.find(turn);
  return found == clocks_.end() ? Clock() : found->second;
}

bool HostCluster::meet(CommGroup& comm_group, std::uint64_t number, int rank,
                       const Contribution& contribution, Clock& clock) {
  const std::lock_guard lock(mutex_);
  auto& meeting = comm_group.meetings[number];
  if (const auto [mine, fresh] = meeting.arrived.emplace(rank, contribution); fresh)
    mine->second.clock = clock;
  if (meeting.arrived.size() == comm_group.ranks && !meeting.done) {
    std::vector<Contribution> ranks;
    for (const auto& [unused, arrived] : meeting.arrived) ranks.push_back(arrived);
    for (const auto& arrived : ranks) {
      if (!arrived.agrees_with(ranks[0]))
        note_locked("ranks disagree in collective " + text_of(arrived.call));
      if (!arrived.lies_as(ranks[0]))
        note_locked("ranks' registered memory is not alike in " + text_of(arrived.call));
    }
    contribution.call.find("Reduce") != StateText::npos ? reduce_on_host(ranks)
                                                        : move_on_host(ranks);
    meeting.done = true;
  }
  if (!meeting.done) return false;
  const bool to_root = contribution.call == "ncclReduce",
             from_root = contribution.call == "ncclBroadcast";
  for (const auto& [other, arrived] : meeting.arrived) {
    const bool gives =
        from_root ? other == contribution.extra : !to_root || rank == contribution.root;
    if (gives) clock.join(arrived.clock);
  }
  return true;
}

bool HostCluster::has_met(CommGroup& comm_group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return comm_group.meetings[number].done;
}

bool HostCluster::has_moved(CommGroup& comm_group, const CommGroup::Way& way) {
  const std::lock_guard lock(mutex_);
  return comm_group.transfers[way].done;
}

void HostCluster::open_window(CommGroup& comm_group, std::uint64_t number, int rank,
                              std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& window = comm_group.windows[number];
  window[rank] = bytes;
  if (window.begin()->second != bytes) note_locked("a window of different sizes");
  joined_.notify_all();
}

bool HostCluster::window_complete(const CommGroup& comm_group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return comm_group.windows.at(number).size() == comm_group.ranks;
}

void HostCluster::wait_for_window(const CommGroup& comm_group, std::uint64_t number) {
  std::unique_lock lock(mutex_);
  joined_.wait(lock, [&] { return comm_group.windows.at(number).size() == comm_group.ranks; });
}

bool HostCluster::transfer(CommGroup& comm_group, const CommGroup::Way& way, bool sends,
                           const Contribution& contribution, Clock& clock) {
  const std::lock_guard lock(mutex_);
  auto& transfer = comm_group.transfers[way];
  if (const auto [mine, fresh] = transfer.halves.emplace(sends, contribution); fresh)
    mine->second.clock = clock;
  if (transfer.halves.size() == 2 && !transfer.done) {
    const Contribution& from = transfer.halves[true];
    const Contribution& to = transfer.halves[false];
    if (from.count != to.count || from.type != to.type) note_locked("sender and receiver disagree");
    std::memmove(to.receive, from.send,
                 std::min(from.count, to.count) * element_bytes(host_type(from.type)));
    transfer.done = true;
  }
  if (transfer.done && !sends) clock.join(transfer.halves[true].clock);
  return transfer.done;
}

bool HostCluster::is_left(const CommGroup& comm_group) {
  const std::lock_guard lock(mutex_);
  return comm_group.left;
}

void HostCluster::withdraw(CommGroup& comm_group, int rank) {
  const std::lock_guard lock(mutex_);
  comm_group.left = true;
  for (auto& [number, meeting] : comm_group.meetings) {
    if (!meeting.done) meeting.arrived.erase(rank);
  }
  for (auto& [way, transfer] : comm_group.transfers) {
    if (transfer.done) continue;
    if (std::get<0>(way) == rank) transfer.halves.erase(true);
    if (std::get<1>(way) == rank) transfer.halves.erase(false);
  }
}

void HostCluster::note(const std::string& misuse) {
  const std::lock_guard lock(mutex_);
  note_locked(misuse);
}

std::vector<std::string> HostCluster::misuses() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const StateText& misuse : misuses_) all.push_back(text_of(misuse));
  for (std::string& error : order_.errors()) all.push_back(std::move(error));
  return all;
}

IpcHandle HostCluster::publish(int owner, void* memory) {
  const std::lock_guard lock(mutex_);
  published_.push_back({owner, memory, nullptr});
  return handle_of(published_.size());
}

IpcHandle HostCluster::publish(int owner, const std::shared_ptr<SharedEvent>& event) {
  const std::lock_guard lock(mutex_);
  published_.push_back({owner, nullptr, event});
  return handle_of(published_.size());
}

HostCluster::Published HostCluster::published(const IpcHandle& handle) {
  const std::lock_guard lock(mutex_);
  std::size_t number = 0;
  std::memcpy(&number, handle.bytes.data(), sizeof number);
  return number >= 1 && number <= published_.size() ? published_[number - 1] : Published{};
}

void HostCluster::opened(void* memory, int change) {
  const std::lock_guard lock(mutex_);
  open_[memory] += change;
}

bool HostCluster::is_open(void* memory) {
  const std::lock_guard lock(mutex_);
  return open_[memory] > 0;
}

IpcHandle HostCluster::handle_of(std::size_t number) {
  IpcHandle handle;
  std::memcpy(handle.bytes.data(), &number, sizeof number);
  return handle;
}

}  // namespace hvd::gpu::test
