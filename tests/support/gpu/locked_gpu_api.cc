#include "tests/support/gpu/locked_gpu_api.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <utility>

#include "ops/gpu/staged/staged_backend.h"

namespace hvd::gpu::test {

GpuApi locked(GpuApi table, std::mutex& mutex) {
  const auto lock =
      [&mutex]<class Result, class... Arguments>(std::function<Result(Arguments...)>& entry) {
        entry = [&mutex, inner = std::move(entry)](Arguments... arguments) {
          const std::lock_guard guard(mutex);
          return inner(arguments...);
        };
      };
  const auto lock_all = [&](auto&... entries) { (lock(entries), ...); };
  lock_all(table.get_device, table.set_device, table.stream_create, table.stream_destroy,
           table.stream_wait_event, table.event_create, table.event_destroy, table.event_record,
           table.event_query, table.mem_info, table.batched_copy, table.shared_reduce,
           table.device_count, table.device_id, table.has_context, table.push_device,
           table.pop_device, table.exchange_capture_mode, table.host_malloc, table.host_free,
           table.poison, table.range_push, table.range_pop, table.host_register,
           table.host_unregister, table.host_device_pointer, table.ipc_supported,
           table.multicast_supported, table.capability, table.device_malloc, table.device_free,
           table.memcpy_async, table.ipc_get_memory, table.ipc_open_memory, table.ipc_close_memory,
           table.ipc_event_create, table.ipc_get_event, table.ipc_open_event);
  lock_all(table.get_version, table.get_unique_id, table.comm_init_rank, table.comm_abort,
           table.comm_get_async_error, table.comm_register, table.comm_deregister,
           table.window_register, table.window_deregister, table.mem_alloc, table.mem_free,
           table.group_start, table.group_end, table.all_reduce, table.broadcast, table.all_gather,
           table.reduce, table.reduce_scatter, table.send, table.receive);
  constexpr std::size_t kLocked = 58;
  constexpr std::size_t kTexts = 2;
  static_assert(sizeof(GpuApi) == (kLocked + kTexts) * sizeof(std::function<void()>),
                "a new entry of the table: lock it here too");
  return table;
}

struct LockedDevices::Locked {
  Locked(HostCluster& cluster, int rank) : device(cluster, rank) {}
  HostDevice device;
  GpuApi table;
  std::mutex mutex;
};

LockedDevices::LockedDevices(int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    auto& device = *devices_.emplace_back(std::make_unique<Locked>(cluster_, rank));
    device.table = locked(device.device.table(), device.mutex);
    controls_.emplace_back();
  }
}

LockedDevices::~LockedDevices() {
  const auto errors = cluster_.order().errors();
  const std::string schedule = devices_.empty() ? std::string() : text_of(device(0).schedule);
  for (const auto& error : errors)
    std::fprintf(stderr, "virtual GPUs, schedule %s: %s\n", schedule.c_str(), error.c_str());
  if (!errors.empty()) std::abort();  // whatever the results are
}

HostDevice& LockedDevices::device(int rank) {
  return devices_.at(static_cast<std::size_t>(rank))->device;
}

void* LockedDevices::gated_event(int rank, const std::atomic<bool>& gate) {
  auto& locked = *devices_.at(static_cast<std::size_t>(rank));
  const std::lock_guard lock(locked.mutex);
  return locked.device.user_event(gate);
}

void LockedDevices::fail_call(int rank, const std::string& name, int code) {
  auto& locked = *devices_.at(static_cast<std::size_t>(rank));
  const std::lock_guard lock(locked.mutex);
  locked.device.fail_call(name, code);
}

void LockedDevices::add_backends(Route way, int rank, EngineParts& parts,
                                 const std::shared_ptr<Arena>& arena) {
  const auto& table = devices_.at(static_cast<std::size_t>(rank))->table;
  std::vector<Backend*> host;
  for (const auto& backend : parts.backends) host.push_back(backend.get());
  if (way == Route::Nccl) {
    NcclOptions options;
    options.streams = 2;
    options.rest_limit = rest_limit;
    options.registration = registration;
    parts.backends.push_back(std::make_unique<NcclBackend>(
        table, rank,
        [this, rank](const ProcessSetInfo& set, Bytes mine) {
          return exchange_.give(rank, set, std::move(mine));
        },
        options));
  }
  if (way == Route::SharedGpu) {
    std::vector<SharedControl*> controls;
    for (auto& control : controls_) controls.push_back(&control);
    SharedGpuOptions options;
    // the engines go one after the other, all in one thread
    options.rest_limit = std::chrono::milliseconds(0);
    if (probes) {
      Board* const board = parts.board.get();
      const auto ring = [board, ranks = static_cast<int>(controls_.size())] {
        for (int index = 0; index < ranks; ++index) board->bells().ring_worker(index);
        board->bells().ring_waiters();
      };
      options.probe = std::make_shared<SharingProbe>(
          table, rank, controls, static_cast<std::size_t>(rank), ring,
          [board] { return board->failed(); }, Remark());
      options.takes = [probe = options.probe](const ProcessSetInfo&) { return probe->possible(); };
    }
    parts.backends.push_back(std::make_unique<SharedGpuBackend>(
        table, rank, *parts.board, parts.topology, std::move(controls), options));
  }
  parts.backends.push_back(std::make_unique<StagedBackend>(
      table, rank, rank, std::move(host), arena, parts.topology.domain_index, WorldFailure{}));
}

}  // namespace hvd::gpu::test
