#pragma once
/// StagedBackend is the Backend (hvd/backend.h) that does for GPU tensors what the others for GPUs
/// cannot: Adasum, and every operation of ranks that share a GPU in a way that neither NCCL nor
/// CUDA IPC allows. A tensor is copied to host memory when it is submitted, travels there like any
/// host tensor, with the same results, and is copied back. The price is that the submitting thread
/// waits until the tensor is there, and that every byte crosses to the host and back.
///
/// What it copies to and from is registered with CUDA (pinned_pool.h) as long as that and the arena
/// give such memory.
///
/// Its threads are those that Backend names. It owns the host blocks, its streams, and nothing
/// else: the host's backends and the arena belong to the world. It fails with BackendError.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "hvd/backend.h"
#include "hvd/errors.h"
#include "ops/gpu/api/gpu_api.h"
#include "ops/gpu/api/handles.h"
#include "ops/gpu/staged/pinned_pool.h"
#include "ops/shm/memory/arena.h"

namespace hvd::gpu {

/// A WorldFailure is how a StagedBackend hears, and tells, that the world has failed. Entries may
/// be empty.
struct WorldFailure {
  std::function<Status()> get;  ///< ok while it has not
  std::function<void(const Status& why)> set;
};

class StagedBackend final : public Backend {
 public:
  /// `host`: the backends for host tensors, in the order in which they are asked. `index`: this
  /// rank's in the domain. `failure`: what the world has failed with ends every wait and is thrown;
  /// what CUDA refuses fails the world. `memory`: what the arena's memory lives by; may be null.
  StagedBackend(const GpuApi& table, int rank, int device, std::vector<Backend*> host,
                std::shared_ptr<Arena> arena, int index, WorldFailure failure,
                std::shared_ptr<void> memory = nullptr);
  ~StagedBackend() override;

  std::string_view name() const override { return "staged"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.device.kind == DeviceKind::Cuda && host_backend(traits) != nullptr;
  }
  std::uint64_t prepare(const BatchTraits& traits, BatchMember& member) override;
  void release(const BatchTraits& traits, std::uint64_t location) noexcept override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  /// Waits for what is being copied back, as long as `rest_limit`.
  bool abort() noexcept override;
  std::chrono::milliseconds rest_limit = std::chrono::seconds(2);  ///< set before use

  // ---- for the executions
  struct HostBlock {
    std::shared_ptr<std::byte> memory;
    bool pinned = false;  ///< registered with CUDA, which then copies without a thread of the host
  };
  [[nodiscard]] HostBlock host_block(std::size_t bytes) const;
  [[nodiscard]] CallContext site(std::span<const std::string_view> tensors) const {
    return {.table = &table_, .rank = rank_, .device = device_, .tensors = tensors};
  }
  [[nodiscard]] const Stream& stream() const { return stream_; }

 private:
  /// A tensor's copy on the host, and what the host's backend returned for it.
  struct Held {
    std::shared_ptr<std::byte> block;
    std::uint64_t location = 0;
  };
  [[nodiscard]] Backend* host_backend(const BatchTraits& traits) const;
  [[nodiscard]] Held take(std::uint64_t location);
  void pass(const CallContext& site, const Stream& stream) const;
  void fetch(const CallContext& site, const BatchMember& member, const HostBlock& to,
             std::size_t bytes);

  const GpuApi& table_;
  const int rank_;
  const int device_;
  const std::vector<Backend*> host_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<PinnedPool> pinned_;
  const std::size_t index_;
  const WorldFailure failure_;
  std::byte* const guard_;  ///< so that no tensor's place is 0, which stands for "nothing brought"
  Stream stream_;           ///< for the way back; of the thread that has the turn

  std::mutex mutex_;  // of the rest
  std::vector<std::unique_ptr<Stream>> idle_;
  std::map<std::uint64_t, Held> held_;  // by the location that `prepare` returned
  std::uint64_t tickets_ = 0;
};

}  // namespace hvd::gpu
