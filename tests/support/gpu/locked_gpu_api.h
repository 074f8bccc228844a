#pragma once
/// The host-memory devices of host_gpu_api.h for whole engines. There, as on a GPU, any thread may
/// let go of an event: the one that drops a handle is not the driver. HostDevice is one thread's,
/// so its table is locked here, a mutex for each device. Uses of the devices' memory without an
/// order among them end the program.

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hvd/engine/engine.h"
#include "ops/gpu/api/placement.h"
#include "ops/gpu/ipc/shared_gpu_backend.h"
#include "tests/support/gpu/nccl_world.h"

namespace hvd::gpu::test {

/// Returns `table` with every call under `mutex`. The texts of errors need none.
GpuApi locked(GpuApi table, std::mutex& mutex);

class LockedDevices {
 public:
  explicit LockedDevices(int ranks);
  ~LockedDevices();
  LockedDevices(const LockedDevices&) = delete;
  LockedDevices& operator=(const LockedDevices&) = delete;

  /// How long NCCL backends wait after a failure for what their streams still do; set before they
  /// are made.
  std::chrono::milliseconds rest_limit{2000};
  /// Whether ranks that share a GPU try it first; likewise.
  bool probes = false;
  /// Of NCCL's fusion buffers, likewise.
  Registration registration = Registration::None;

  /// To make it fail; not while a world uses it.
  HostDevice& device(int rank);
  /// While a world uses it: an event of the user's that happens once the gate, which outlives it,
  /// is open.
  void* gated_event(int rank, const std::atomic<bool>& gate);
  /// While a world uses it: its next call of that name fails.
  void fail_call(int rank, const std::string& name, int code);

  /// As ops/backends.cc does it, for ranks whose tensors all travel one way. What that cannot do is
  /// staged.
  void add_backends(Route way, int rank, EngineParts& parts, const std::shared_ptr<Arena>& arena);

 private:
  struct Locked;

  HostCluster cluster_;
  std::vector<std::unique_ptr<Locked>> devices_;
  std::deque<SharedControl> controls_;
  IdExchange exchange_;
};

}  // namespace hvd::gpu::test
