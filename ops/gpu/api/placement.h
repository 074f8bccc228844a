#pragma once
/// A Placement says which ranks have which GPU, and so how the tensors of a set of ranks travel. It
/// is a value made at `init()` from what all ranks say of themselves, so its answers are the same
/// on every rank.
// Tested in tests/ops/gpu/ipc/shared_gpu_backend_test.cc

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/routes.h"
#include "ops/gpu/api/gpu_api.h"

namespace hvd::gpu {

class Placement {
 public:
  /// All by global rank: the host it is on; the ranks that it shares host memory with; what
  /// `gpu_id` says, empty for a rank without a GPU. `has_nccl`: without it, ranks with a GPU each
  /// are staged, and one alone shares its GPU with itself. `wanted` is followed where it is
  /// possible. `has_ipc`: all these GPUs have what ranks that share one need; without it they are
  /// staged.
  Placement(const std::vector<int>& host_of_rank, std::vector<int> domain_of_rank,
            const std::vector<std::string>& gpu_of_rank, bool has_nccl,
            std::optional<Route> wanted = std::nullopt, bool has_ipc = true);

  /// Returns Nccl, SharedGpu (the ranks share memory on the host, too) or, for anything else,
  /// Staged. `ranks`: global, ascending.
  [[nodiscard]] Route route_of(const std::vector<int>& ranks) const;
  /// Returns the same, remembered for each process set. Any thread.
  [[nodiscard]] Route route_of_set(int id, const std::vector<int>& ranks) const;
  /// Returns the ranks of `rank`'s domain that have its GPU, itself among them, ascending; none if
  /// it has none.
  [[nodiscard]] std::vector<int> sharers_of(int rank) const;
  /// "one rank per GPU, NCCL", "4 ranks share a GPU, through CUDA IPC", ...
  [[nodiscard]] std::string describe() const;

 private:
  std::vector<int> gpu_;  // a host and a GPU of it, as a number
  std::vector<int> domain_of_rank_;
  bool has_nccl_;
  bool has_ipc_;
  bool nccl_shares_ = true;  ///< NCCL takes several ranks of one GPU, on all of them
  std::optional<Route> wanted_;
  mutable std::mutex mutex_;
  mutable std::map<int, std::pair<std::vector<int>, Route>> known_;  // by the set's id
};

/// CUDA's index of the GPU that a rank works on, its own where there are enough: `local_rank`
/// modulo their number. -1 without one.
int device_of(const GpuApi& table, int local_rank);
/// Makes the rank's GPU the calling thread's current one, so that memory without a device of its
/// own is made there. It makes no context: in a process that has not used that GPU yet nothing
/// happens, and front ends do what they can (torch_bindings/platform/device_cuda.cc). Returns a
/// remark where the process has used another one, or an empty text.
std::string make_current(const GpuApi& table, int device, int rank);
/// Returns whether ranks can share the device; true where there is none.
bool can_share(const GpuApi& table, int device);
/// Returns whether code built for these architectures (`gpu_architectures()`) runs on a GPU of this
/// compute capability, 86 for 8.6: binary code within its major version, PTX on all that come
/// after; of "90a" on that one alone, of "100f" on its major version from there on. What is no list
/// of numbers ("native", "all-major") is believed in.
bool runs_on(std::string_view architectures, int capability);
/// Returns what to say of a device that the kernels do not run on; empty if they do, and where
/// there is none.
std::string lack_of_kernels(const GpuApi& table, int device, std::string_view architectures);
/// Returns whether switches sum for the device; false where there is none.
bool has_multicast(const GpuApi& table, int device);
/// Returns whether NCCL takes several ranks of one GPU: from 2.30 on, where
/// NCCL_MULTI_RANK_GPU_ENABLE=1 asks it to. A Placement uses that where NCCL is wanted.
bool nccl_shares_gpus(const GpuApi& table);
/// Returns the UUID of a device, behind a "+" where `nccl_shares_gpus` and it `may_share`; empty
/// where there is none.
std::string gpu_id(const GpuApi& table, int device, bool may_share = false);

}  // namespace hvd::gpu
