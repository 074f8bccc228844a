#pragma once
/// What all processes of a job see of its virtual GPUs: their memory, events, communicators, and
/// the order of uses, in a file that HVD_TEST_GPU_WORLD names (a process alone needs none), mapped
/// at one address everywhere. Any thread, under a Lock.
///
/// A device's memory is mapped twice: where programs believe it to be, nobody has access (a host
/// that touches it crashes, as on a GPU), and the executor sees it elsewhere.

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/gpu/double/work.h"
#include "tests/support/host_cluster.h"

namespace hvd::gpu::test::cuda {

inline constexpr int kMostDevices = 4;

/// How many HVD_TEST_GPUS says; 1 unless it is set.
int device_count();
/// The rank that whoever has started this process gave it; 0 alone.
int process();

struct World {
  pthread_mutex_t mutex;
  std::uint64_t ready;
  std::uintptr_t heap_end;
  void* heap_free[48];  ///< by the logarithm of the size
  HostCluster cluster;
  struct Piece {
    std::size_t bytes = 0;
    int owner = 0;
    int opened = 0;  ///< by other processes
  };
  struct Device {
    StateMap<std::uintptr_t, Piece> pieces;
    std::uintptr_t next = 0;
    std::size_t used = 0;
  };
  Device devices[kMostDevices];
};

World& world();
inline HappensBefore& order() { return world().cluster.order(); }

/// Of all processes; a thread may have it several times.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

/// Makes this process fail when it ends, and says at once what is wrong.
void complain(const std::string& misuse);
/// Complains of what the cluster has noted since.
void look_for_errors();

// ---- memory of devices
inline int device_of(const void* memory) {
  return static_cast<int>((number_of(memory) - kDevices) / kDeviceStride);
}
/// Poison; null: there is not so much.
void* take(int device, std::size_t bytes, const std::string& what);
/// False: no piece begins there.
bool give(void* memory, const std::string& call);
/// The piece that has the byte, or null.
World::Piece* piece_at(const void* memory, std::uintptr_t* begin = nullptr);
inline constexpr std::size_t kDeviceBytes = std::size_t{4} << 30;
/// Of which it gives away so many (HVD_TEST_GPU_MIB: fewer).
std::size_t device_bytes();
/// Managed memory of a process, which all ranks' devices reach.
inline constexpr std::uintptr_t kManaged = 0x250000000000;
inline constexpr std::size_t kManagedBytes = std::size_t{8} << 30;
inline constexpr int kMostProcesses = 8;
/// Likewise, what cudaHostAlloc gives: whoever computes a collective reaches it.
inline constexpr std::uintptr_t kPinned = kManaged + kMostProcesses * kManagedBytes;

}  // namespace hvd::gpu::test::cuda
