#pragma once
/// Room card: the host-memory devices of tests/support for whole engines. There, as on a GPU, any thread may let go of an event: the
/// one that drops a handle is not the driver. HostDevice is one thread's, so its table is locked here, a mutex for each device.

#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "hvd/engine.h"
#include "ops/nccl/placement.h"
#include "ops/nccl/shared_gpu_backend.h"
#include "ops/nccl/staged_backend.h"
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
           table.event_destroy, table.event_record, table.event_query, table.mem_info, table.batched_copy, table.shared_reduce,
           table.device_count, table.device_id, table.device_malloc, table.device_free, table.memcpy_async, table.ipc_get_memory,
           table.ipc_open_memory, table.ipc_close_memory, table.ipc_event_create, table.ipc_get_event, table.ipc_open_event);
  lock_all(table.get_unique_id, table.comm_init_rank, table.comm_abort, table.comm_get_async_error, table.comm_register,
           table.comm_deregister, table.mem_alloc, table.mem_free, table.group_start, table.group_end, table.all_reduce, table.broadcast,
           table.all_gather, table.reduce, table.reduce_scatter, table.send, table.receive);
  constexpr std::size_t kLocked = 40;
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
      controls_.emplace_back();
    }
  }

  /// To make it fail; not while a world uses it.
  nccl::test::HostDevice& device(int rank) { return devices_.at(static_cast<std::size_t>(rank))->device; }

  /// As ops/backends.cc does it, for ranks whose tensors all travel one way. What that cannot do is staged.
  void add_backends(nccl::Way way, int rank, EngineParts& parts, const std::shared_ptr<Arena>& arena) {
    const auto& table = devices_.at(static_cast<std::size_t>(rank))->table;
    std::vector<Backend*> host;
    for (const auto& backend : parts.backends) host.push_back(backend.get());
    if (way == nccl::Way::Nccl) {
      nccl::NcclOptions options;
      options.streams = 2;
      parts.backends.push_back(std::make_unique<nccl::NcclBackend>(
          table, rank,
          [this, rank](const ProcessSetInfo& set, std::vector<std::byte> mine) { return exchange_.give(rank, set, std::move(mine)); },
          options));
    }
    if (way == nccl::Way::SharedGpu) {
      std::vector<nccl::SharedControl*> controls;
      for (auto& control : controls_) controls.push_back(&control);
      nccl::SharedGpuOptions options;
      options.rest_limit = std::chrono::milliseconds(0);  // the engines go one after the other, all in one thread
      parts.backends.push_back(
          std::make_unique<nccl::SharedGpuBackend>(table, rank, *parts.board, parts.topology, std::move(controls), options));
    }
    parts.backends.push_back(
        std::make_unique<nccl::StagedBackend>(table, rank, rank, std::move(host), arena, parts.topology.domain_index, nullptr));
  }

 private:
  struct Locked {
    Locked(nccl::test::HostCluster& cluster, int rank) : device(cluster, rank) {}
    nccl::test::HostDevice device;
    nccl::NcclTable table;
    std::mutex mutex;
  };

  nccl::test::HostCluster cluster_;
  std::vector<std::unique_ptr<Locked>> devices_;
  std::deque<nccl::SharedControl> controls_;
  nccl::test::IdExchange exchange_;
};

}  // namespace hvd::contract
