#pragma once
/// Room card: every knob, whole: meaning, unit, default, and what gets worse when it is raised. A value, read once at `init()`.
/// The only place that reads the environment.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hvd/log.h"

namespace hvd {

enum class SharedMemory : std::uint8_t { Auto, Off };

struct Config {
  /// Bytes that tensors may fill together in one batch (HVD_FUSION_THRESHOLD, default 128 MiB, 0 = every tensor alone).
  /// Raised: fewer, larger batches; the first one starts later and staging memory grows.
  std::uint64_t fusion_threshold_bytes = std::uint64_t{128} << 20;

  /// Tensors known at once, all process sets together (HVD_CACHE_CAPACITY, default 65536, at least 16). The least recently used
  /// name is forgotten when there are more, and introduced anew when it comes back. Raised: 16 bytes per tensor and local rank.
  std::uint32_t cache_capacity = 65536;

  /// A tensor that some ranks have submitted and others have not is reported after this time, and again after each further such
  /// time (HVD_STALL_CHECK_TIME_SECONDS, default 60; HVD_STALL_CHECK_DISABLE=1: never).
  std::chrono::seconds stall_check_time{60};
  bool stall_check_disable = false;
  /// After this time the job ends with StallTimeout (HVD_STALL_SHUTDOWN_TIME_SECONDS, default 0 = never).
  std::chrono::seconds stall_shutdown_time{0};

  /// Lines below this level are not printed (HVD_LOG_LEVEL: trace, debug, info, warning, error, fatal, off; default warning).
  LogLevel log_level = LogLevel::Warning;

  /// Whether ranks of one host work in shared memory (HVD_SHARED_MEMORY: auto or off, default auto). Off: everything through MPI,
  /// several times slower; for measuring, and for hosts that forbid one process to see another's memory.
  SharedMemory shared_memory = SharedMemory::Auto;

  /// Address space that each rank reserves for tensors in shared memory (HVD_ARENA_BYTES, default 64 GiB). Only what is used takes
  /// memory. Tensors beyond it take the slower copying path.
  std::uint64_t arena_bytes = std::uint64_t{64} << 30;

  /// Process sets that exist from `init()` on, besides the global one; `process_set(1)` is the first of them.
  std::vector<std::vector<int>> process_sets;

  /// The values of HVD_* and, where HVD_* is unset, of the HOROVOD_* variable of the same meaning.
  /// Throws InvalidArgument naming the variable, its value and what is allowed.
  static Config from_environment();
};

/// What must be equal on all ranks, as one line of text.
std::string shared_part(const Config& config);

/// What the launcher says about this process before MPI is up; empty where it says nothing.
struct LauncherHints {
  std::optional<int> rank, size, local_rank;
};
LauncherHints launcher_hints();

/// Whether the user has fixed the number of threads per process (OMP_NUM_THREADS or MKL_NUM_THREADS).
bool thread_count_is_fixed();

}  // namespace hvd
