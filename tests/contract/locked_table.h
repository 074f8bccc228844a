#pragma once
/// Room card: the host-memory devices of tests/support for whole engines. There, as on a GPU, any thread may let go of an event: the
/// one that drops a handle is not the driver. HostDevice is one thread's, so its table is locked here, a mutex for each device.

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "tests/support/nccl_world.h"

namespace hvd::contract {

/// `table` with every call under `mutex`. The texts of errors need none.
inline nccl::NcclTable locked(nccl::NcclTable table, std::mutex& mutex) {
  const auto lock = [&mutex]<class Result, class... Arguments>(std::function<Result(Arguments...)>& entry) {
    entry = [&mutex, inner = std::move(entry)](Arguments... arguments) {
      const std::lock_guard guard(mutex);
      return inner(arguments...);
    };
  };
  const auto lock_all = [&](auto&... entries) { (lock(entries), ...); };
  lock_all(table.get_device, table.set_device, table.stream_create, table.stream_destroy, table.stream_wait_event, table.event_create,
           table.event_destroy, table.event_record, table.event_query, table.mem_info, table.batched_copy);
  lock_all(table.get_unique_id, table.comm_init_rank, table.comm_abort, table.comm_get_async_error, table.comm_register,
           table.comm_deregister, table.mem_alloc, table.mem_free, table.group_start, table.group_end, table.all_reduce, table.broadcast,
           table.all_gather, table.reduce, table.reduce_scatter, table.send, table.receive);
  constexpr std::size_t kLocked = 28;
  constexpr std::size_t kTexts = 2;
  static_assert(sizeof(nccl::NcclTable) == (kLocked + kTexts) * sizeof(std::function<void()>),
                "a new entry of the table: lock it here too");
  return table;
}

class LockedDevices {
 public:
  explicit LockedDevices(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      auto& device = *devices_.emplace_back(std::make_unique<Locked>(cluster_, rank));
      device.table = locked(device.device.table(), device.mutex);
    }
  }

  std::unique_ptr<Backend> make_backend(int rank) {
    return std::make_unique<nccl::NcclBackend>(
        devices_.at(static_cast<std::size_t>(rank))->table, rank,
        [this](const ProcessSetInfo& set, std::vector<std::byte> mine) { return exchange(set, std::move(mine)); }, nccl::NcclOptions{});
  }

 private:
  struct Locked {
    Locked(nccl::test::HostCluster& cluster, int rank) : device(cluster, rank) {}
    nccl::test::HostDevice device;
    nccl::NcclTable table;
    std::mutex mutex;
  };

  std::vector<std::byte> exchange(const ProcessSetInfo& set, std::vector<std::byte> mine) {
    std::unique_lock lock(mutex_);
    if (set.rank == 0) posted_[set.ranks] = std::move(mine);
    arrived_.notify_all();
    arrived_.wait(lock, [&] { return posted_.contains(set.ranks); });
    return posted_[set.ranks];
  }

  nccl::test::HostCluster cluster_;
  std::vector<std::unique_ptr<Locked>> devices_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::vector<int>, std::vector<std::byte>> posted_;
};

}  // namespace hvd::contract
