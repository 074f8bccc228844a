#pragma once
/// This file has every knob with its meaning, unit, default and what gets worse when it is raised;
/// docs/configuration.md has them as a table. A Config is a value, read once at `init()`. Nothing
/// else in the library reads the environment.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/base/log_level.h"

#pragma GCC visibility push(default)
namespace hvd {

/// SharedMemory says whether ranks of one host work in shared memory; see Config::shared_memory.
enum class SharedMemory : std::uint8_t { Auto, Off };
/// DirectCopies says whether ranks of one host read each other's ordinary memory; see
/// Config::direct_copies.
enum class DirectCopies : std::uint8_t { Auto, On, Relayed, Off };
/// Wire says over what ranks that share no memory send each other messages; see Config::wire.
enum class Wire : std::uint8_t { Auto, Mpi, Ucx };
/// GpuBackend says how GPU tensors travel; see Config::gpu_backend.
enum class GpuBackend : std::uint8_t { Auto, Nccl, Shared, Staged };
/// ReplicaGuard says how much of what should be equal on all ranks is compared while they train;
/// see Config::replica_guard.
enum class ReplicaGuard : std::uint8_t { Slice, Full, Off };
/// NcclRegistration says what NCCL is told of its memory; see Config::nccl_registration.
enum class NcclRegistration : std::uint8_t { None, Buffer, Window };

/// A Config has a field for each knob. What must be equal on all ranks is compared at `init()`.
struct Config {
  /// Bytes that submissions may fill together in one batch (HVD_FUSION_THRESHOLD, default 128 MiB,
  /// 0 = each alone). A larger one travels alone. Raised: fewer, larger batches, and larger
  /// fusion buffers on a GPU.
  std::uint64_t fusion_threshold_bytes = std::uint64_t{128} << 20;

  /// Tensors known at once, all process sets together (HVD_CACHE_CAPACITY, default 65536; in the
  /// variable, Horovod's for a mere cache, less counts as that; here at least 16). The least
  /// recently used name is forgotten when there are more, and introduced anew when it is used
  /// again. More in flight, or in a group, are refused. Each costs 128 bytes per
  /// local rank once it is used.
  std::uint32_t cache_capacity = 65536;

  /// Accepted for Horovod's sake, and without effect here: there is no cycle (HVD_CYCLE_TIME,
  /// milliseconds, default 0). What is agreed is launched at once, and what is agreed meanwhile is
  /// fused; holding a small batch back for a timer would only delay it.
  std::chrono::microseconds cycle_time{0};

  /// True: a group shares its batches with no other tensor (HVD_DISABLE_GROUP_FUSION, default 0).
  /// Set: more, smaller batches.
  bool disable_group_fusion = false;

  /// Time after which a tensor that some ranks have submitted and others have not is reported, and
  /// again after each further such time (HVD_STALL_CHECK_TIME_SECONDS, default 60).
  std::chrono::seconds stall_check_time{60};
  /// True: such tensors are never reported (HVD_STALL_CHECK_DISABLE, default 0).
  bool stall_check_disable = false;
  /// Time after which such a tensor ends the job with StallTimeout
  /// (HVD_STALL_SHUTDOWN_TIME_SECONDS, default 0 = never).
  std::chrono::seconds stall_shutdown_time{0};

  /// Silence of a host, between several hosts, that ends the world with RankFailed
  /// (HVD_HOST_TIMEOUT_SECONDS, default 30, 0 = never; less than three beats of a host, 3 s, counts
  /// as that). Raised: a host that has lost its power or its network is noticed later.
  std::chrono::seconds host_timeout{30};

  /// Optimizers and DistributedDataParallel compare so much between the ranks with each reduction
  /// of gradients, of the parameters and of the options of an optimizer's groups
  /// (HVD_REPLICA_GUARD: slice, full or off, default slice). Slice: all of it the first time, then
  /// 256 KiB of the parameters each time, in turn; a difference is a Mismatch on all ranks. Full:
  /// all of it each time. Off: names, once.
  ReplicaGuard replica_guard = ReplicaGuard::Slice;

  /// Time in which all ranks must have come to where they meet without MPI (HVD_START_TIMEOUT,
  /// seconds, default 60); those that have not are then named by all who have, and by a warning
  /// after 10 s. Raised: a rank that was never started is noticed later.
  std::chrono::seconds start_timeout{60};

  /// Level below which lines are not printed (HVD_LOG_LEVEL: trace, debug, info, warning, error,
  /// fatal, off; default warning).
  LogLevel log_level = LogLevel::Warning;

  /// File that the timeline is written to from `init()` on, see `start_timeline` (HVD_TIMELINE,
  /// default: nowhere; DYNAMIC, Horovod's word for "later, by start_timeline", means nowhere too).
  /// On: about three microseconds per tensor and rank, and 1 KiB of file.
  std::string timeline{};
  /// True: the timeline shows where each batch was cut (HVD_TIMELINE_MARK_CYCLES, default 0).
  bool timeline_mark_cycles = false;
  /// Bytes that the timeline may grow to (HVD_TIMELINE_MAX_BYTES, default 1 GiB, at least 64 KiB);
  /// a last event says that it is full. Raised: viewers take minutes to open what is larger.
  std::uint64_t timeline_max_bytes = std::uint64_t{1} << 30;

  /// Cores that the coordination threads are pinned to, by local rank (HVD_THREAD_AFFINITY, a list
  /// such as 0,4,8,12; default: not pinned). A thread that waits for its result drives the library
  /// itself and stays where it is.
  std::vector<int> thread_affinity{};

  /// Streams, each with communicators and a fusion buffer of its own, that the batches of GPU
  /// tensors go to in turn (HVD_NUM_NCCL_STREAMS, default 1, at most 4). Raised: the copies of a
  /// batch overlap the reduction of the one before; more device memory held. Reductions follow one
  /// another in any case.
  int num_nccl_streams = 1;

  /// The registration of memory with NCCL (HVD_NCCL_REGISTRATION: none, buffer or window, default
  /// none). None: nothing is registered, and gradients lie where they are reduced, so that they
  /// need no packing. Buffer, window: all that travels fused is packed into a buffer that is
  /// registered with NCCL (ncclCommRegister), or that is a symmetric window
  /// (ncclCommWindowRegister, from NCCL 2.29.7 on; before, as buffer): NCCL then needs fewer steps
  /// and fewer of the GPU's multiprocessors, where NVLink or the network's switches can do their
  /// part.
  NcclRegistration nccl_registration = NcclRegistration::None;

  /// Accepted for Horovod's sake; `init()` says that it does nothing (HVD_AUTOTUNE, default 0).
  /// There is no cycle time to tune, and the fusion threshold hardly matters where tensors are
  /// reduced in place.
  bool autotune = false;
  /// Accepted likewise, without effect (HVD_AUTOTUNE_LOG, a path).
  std::string autotune_log{};

  /// True: sums of GPU tensors across hosts with equally many ranks are made on each host first, by
  /// three calls of NCCL instead of one (HVD_HIERARCHICAL_ALLREDUCE, default 0: NCCL knows the
  /// hosts itself). Sums of host tensors always are, whatever it says.
  bool hierarchical_allreduce = false;

  /// Accepted for Horovod's sake; `init()` says that it does nothing yet (HVD_ELASTIC, default 0).
  bool elastic = false;

  /// Auto: ranks of one host work in shared memory (HVD_SHARED_MEMORY: auto or off, default auto).
  /// Off: host tensors travel as messages (see `wire`), several times slower; for measuring, and
  /// for hosts that forbid one process to see another's memory.
  SharedMemory shared_memory = SharedMemory::Auto;

  /// The library that carries messages between ranks that share no memory (HVD_WIRE: auto, mpi or
  /// ucx, default auto). Auto: MPI where the ranks met through it, UCX where they met without.
  /// Ranks of one host that share memory need neither.
  Wire wire = Wire::Auto;

  /// On: ranks of one host read large tensors of each other where they are, by one copy that the
  /// kernel makes (process_vm_readv), instead of by one into shared memory and one out of it
  /// (HVD_DIRECT_COPIES: auto, on, relayed or off, default auto). Relayed: they pass through small
  /// rings of shared memory that stay in the cache. Auto: where `init()` finds that all ranks of
  /// the host may, as `on`, or as `relayed` where it measures that the kernel copies slowly. All
  /// but auto are for measuring, and may differ between ranks. Off: a rank's tensor may change
  /// hands before the others have come to read it.
  DirectCopies direct_copies = DirectCopies::Auto;

  /// The way of GPU tensors (HVD_GPU_BACKEND: auto, nccl, shared or staged, default auto). Auto: by
  /// NCCL among ranks that have a GPU each; through CUDA IPC among ranks of a host that share one;
  /// otherwise staged through host memory, which is slow. The other words are for tests and
  /// measurements, and are followed where that is possible: `nccl` as auto, and on one GPU where
  /// NCCL 2.30 is told to (NCCL_MULTI_RANK_GPU_ENABLE), `shared` also for one rank, `staged`
  /// always.
  GpuBackend gpu_backend = GpuBackend::Auto;

  /// Address space that each rank reserves for tensors in shared memory (HVD_ARENA_BYTES, default
  /// 64 GiB). Only what is used takes memory. Tensors beyond it take the slower copying path.
  std::uint64_t arena_bytes = std::uint64_t{64} << 30;

  /// Bytes of large results on the host (of allgather, alltoall and reducescatter, from 256 KiB on)
  /// that this rank keeps when the results end, for the next of about that size
  /// (HVD_RESULT_POOL_BYTES, default 256 MiB, 0 = none). Where ranks share memory they lie there,
  /// and together with the results in use fill at most a quarter of `arena_bytes`; what is beyond,
  /// and a result larger than this, has new memory. Raised: memory that is held between results;
  /// too low: each large result costs the time in which the system clears its pages.
  std::uint64_t result_pool_bytes = std::uint64_t{256} << 20;

  /// Process sets that exist from `init()` on, besides the global one; `process_set(1)` is the
  /// first of them.
  std::vector<std::vector<int>> process_sets{};

  /// Returns the values of HVD_* and, where HVD_* is unset or empty, of the HOROVOD_* variable of
  /// the same meaning. Throws InvalidArgument naming the variable, its value and what is allowed.
  static Config from_environment();
};

/// Makes it one that ranks can meet with: longer times than a variable may say, which mean never,
/// become the longest; with a number that is not allowed, all becomes as usual. Returns what is
/// wrong with that number, naming the field; empty if all are allowed.
std::string put_right(Config& config);
/// Returns what must be equal on all ranks: the variable (or field) and its value as text.
std::vector<std::pair<std::string, std::string>> shared_part(const Config& config);
/// Returns a sentence for each knob that is set and does nothing, where that may surprise.
std::vector<std::string> remarks(const Config& config);

/// LauncherHints are what the launcher says about this process before MPI is up; or empty.
struct LauncherHints {
  /// @{
  /// The numbers that Topology has under these names.
  std::optional<int> rank, size, local_rank;
  /// @}
};
/// Returns what the launcher says about this process, whichever it is (docs/configuration.md,
/// "Starting ranks"); nothing where what it says contradicts itself, which `init()` refuses.
LauncherHints launcher_hints();

/// Returns whether the user has fixed the number of threads per process (OMP_NUM_THREADS or
/// MKL_NUM_THREADS).
bool thread_count_is_fixed();

namespace detail {
/// Returns a variable's value; empty where it is unset or empty. For hvd/launch/launch.h and
/// ops/backends.cc: nothing else reads the environment.
std::optional<std::string> variable_of_environment(const std::string& name);
// For spawn(), likewise.
char** process_environment();
/// The folder for what a rank has to say; empty if spawn() did not start it.
const char* spawn_reports();
inline constexpr const char* kSpawnReports = "HVD_SPAWN_REPORTS";
}  // namespace detail

}  // namespace hvd
#pragma GCC visibility pop
