#pragma once
/// This file has every knob with its unit and default; docs/configuration.md says what each means
/// and what gets worse when it is raised. A Config is a value, read once at `init()`. Nothing else
/// in the library reads the environment.

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
  /// Most bytes of submissions in one batch (HVD_FUSION_THRESHOLD, default 128 MiB, 0 = each
  /// alone). A larger one travels alone.
  std::uint64_t fusion_threshold_bytes = std::uint64_t{128} << 20;
  /// Tensors known at once, all process sets together (HVD_CACHE_CAPACITY, default 1024 as in
  /// Horovod, where it is that of a mere cache; less than 65536 counts as that).
  std::uint32_t cache_capacity = 1024;
  /// Checked, and without effect: there is no cycle (HVD_CYCLE_TIME, milliseconds, default 0).
  std::chrono::microseconds cycle_time{0};
  /// True: a group shares its batches with no other tensor (HVD_DISABLE_GROUP_FUSION, default 0).
  bool disable_group_fusion = false;

  /// When, and how often, a tensor that only some ranks have submitted is reported
  /// (HVD_STALL_CHECK_TIME_SECONDS, default 60).
  std::chrono::seconds stall_check_time{60};
  /// True: such tensors are never reported (HVD_STALL_CHECK_DISABLE, default 0).
  bool stall_check_disable = false;
  /// Time after which such a tensor ends the job with StallTimeout
  /// (HVD_STALL_SHUTDOWN_TIME_SECONDS, default 0 = never).
  std::chrono::seconds stall_shutdown_time{0};
  /// Silence of a host, or of the rank that speaks for this one, between several hosts, that ends
  /// the world with RankFailed (HVD_HOST_TIMEOUT_SECONDS, default 30, 0 = never; less than 3 counts
  /// as 3).
  std::chrono::seconds host_timeout{30};

  /// The state that optimizers and DistributedDataParallel compare with each reduction
  /// (HVD_REPLICA_GUARD: slice, full or off, default slice); a difference is a Mismatch on all.
  ReplicaGuard replica_guard = ReplicaGuard::Slice;

  /// Time in which all ranks must have come to where they meet without MPI (HVD_START_TIMEOUT,
  /// seconds, default 60).
  std::chrono::seconds start_timeout{60};

  /// Level below which lines are not printed (HVD_LOG_LEVEL: trace, debug, info, warning, error,
  /// fatal, off; default warning).
  LogLevel log_level = LogLevel::Warning;

  /// File of the timeline from `init()` on, see `start_timeline` (HVD_TIMELINE, default: none;
  /// DYNAMIC, Horovod's word for "later, by start_timeline", means none too).
  std::string timeline{};
  /// True: the timeline shows where each batch was cut (HVD_TIMELINE_MARK_CYCLES, default 0).
  bool timeline_mark_cycles = false;
  /// Bytes that the timeline may grow to (HVD_TIMELINE_MAX_BYTES, default 1 GiB, at least 64 KiB).
  std::uint64_t timeline_max_bytes = std::uint64_t{1} << 30;

  /// Cores that the coordination threads are pinned to, by local rank (HVD_THREAD_AFFINITY, a list
  /// such as 0,4,8,12; default: not pinned). A thread that waits for its result stays where it is.
  std::vector<int> thread_affinity{};

  /// Streams, each with communicators and a fusion buffer, that batches of GPU tensors go to in
  /// turn (HVD_NUM_NCCL_STREAMS, default 1, at most 4).
  int num_nccl_streams = 1;
  /// The registration of memory that NCCL works on (HVD_NCCL_REGISTRATION: none, buffer or window,
  /// default none); with buffer and window all that is fused is packed into such memory.
  NcclRegistration nccl_registration = NcclRegistration::None;

  /// Without effect, as `init()` says (HVD_AUTOTUNE, default 0).
  bool autotune = false;
  /// A file, without effect either (HVD_AUTOTUNE_LOG, a path, default: none).
  std::string autotune_log{};
  /// True: sums of GPU tensors across hosts with equally many ranks are made on each host first
  /// (HVD_HIERARCHICAL_ALLREDUCE, default 0: NCCL decides). Sums of host tensors always are.
  bool hierarchical_allreduce = false;
  /// Without effect, as `init()` says (HVD_ELASTIC, default 0).
  bool elastic = false;

  /// Auto: ranks of one host work in shared memory (HVD_SHARED_MEMORY: auto or off, default auto).
  /// Off: host tensors travel as messages (see `wire`), several times slower.
  SharedMemory shared_memory = SharedMemory::Auto;
  /// The library that carries messages between ranks that share no memory (HVD_WIRE: auto, mpi or
  /// ucx, default auto). Auto: MPI where the ranks met through it, else UCX.
  Wire wire = Wire::Auto;
  /// The way that ranks of a host read each other's large tensors in ordinary memory
  /// (HVD_DIRECT_COPIES: auto, on, relayed or off, default auto, as `init()` measures). It may
  /// differ between ranks.
  DirectCopies direct_copies = DirectCopies::Auto;
  /// The way of GPU tensors (HVD_GPU_BACKEND: auto, nccl, shared or staged, default auto). The
  /// other words are followed where that is possible.
  GpuBackend gpu_backend = GpuBackend::Auto;

  /// Addresses, in bytes, that each rank reserves for tensors in shared memory (HVD_ARENA_BYTES,
  /// default 64 GiB). Only what is used takes memory; tensors beyond are copied.
  std::uint64_t arena_bytes = std::uint64_t{64} << 30;
  /// Bytes of large results on the host (of allgather, alltoall and reducescatter, from 256 KiB on)
  /// that this rank keeps for the next ones (HVD_RESULT_POOL_BYTES, default 256 MiB, 0 = none). In
  /// shared memory these and the results in use fill at most a quarter of `arena_bytes`.
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
  std::optional<int> rank;  ///< the same as Topology's
  std::optional<int> size;  ///< likewise
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
