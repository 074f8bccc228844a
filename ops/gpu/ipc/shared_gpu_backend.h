#pragma once
/// SharedGpuBackend is the Backend (hvd/backend.h) for ranks of one host that share one GPU, which
/// NCCL refuses. Every rank's tensors are where the others can open them by CUDA IPC: in this
/// rank's pool (device_pool.h), where tensors may live already, or in a block of it that they are
/// packed into. An allreduce is one kernel, launched by the rank that arrives last, that reduces
/// all ranks' tensors in place; the other operations copy (reducescatter: reduce) out of the other
/// ranks' blocks, each rank its own share.
///
/// Order: every rank records an IPC event behind its pack, then counts itself in through host
/// memory (the board's BatchState). The last one makes its stream wait for all those events,
/// launches the kernel, records an event behind it and says so; the others make their streams wait
/// for that. Nothing spins on the device, so it does not matter that processes take turns on it.
/// (An event may have been recorded anew, for a later batch, when somebody waits for it. That is
/// later on the same stream, and nothing a rank enqueues before it has seen a batch reduced depends
/// on that batch: it waits a little longer, never for itself.)
///
/// Sums are made in rank order, as on the host, and are bitwise the host's.
/// Its threads are those that Backend names. It owns the stream, the events, the pool and what it
/// opened of others, all made at first use. It fails with BackendError; later launches then fail
/// too. A rank without memory says so where the tensor is announced, and all ranks fail with its
/// reason. Destroy it after the ranks have agreed to end, or after `abort`.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/backend.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/topology.h"
#include "ops/gpu/api/gpu_api.h"
#include "ops/gpu/api/handles.h"
#include "ops/gpu/ipc/device_pool.h"
#include "ops/gpu/ipc/sharing_probe.h"

namespace hvd::gpu {

struct SharedGpuOptions {
  /// Returns whether this backend works for the set, always the same. The first question about a
  /// set of this rank's may wait for the other ranks that share the GPU (SharingProbe::possible).
  std::function<bool(const ProcessSetInfo& set)> takes;
  /// Is asked to look, now and then, whether another rank wants to know; may be null.
  std::shared_ptr<SharingProbe> probe;
  /// `abort` waits so long for the stream to run dry, and the destructor for the other ranks to
  /// close this rank's memory. Longer: a rank that is stuck ends later.
  std::chrono::milliseconds rest_limit = std::chrono::seconds(2);
};

class SharedGpuBackend final : public Backend {
 public:
  /// `controls`: every rank's of the domain, zeroed, by index; they and `board` outlive the
  /// backend. Calls nothing yet.
  SharedGpuBackend(const GpuApi& table, int device, Board& board, Topology topology,
                   std::vector<SharedControl*> controls, SharedGpuOptions options);
  ~SharedGpuBackend() override;

  std::string_view name() const override { return "cuda_ipc"; }
  bool supports(const BatchTraits& traits) const override;
  std::uint64_t prepare(const BatchTraits& traits, BatchMember& member) override;
  void release(const BatchTraits& traits, std::uint64_t location) noexcept override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  std::shared_ptr<void> allocate(const BatchTraits& traits, std::size_t bytes) override;
  bool abort() noexcept override;
  void look_again() override {
    if (options_.probe) options_.probe->look();
  }

  // ---- for the executions; for the thread that has the turn
  [[nodiscard]] Board& board() const { return board_; }
  [[nodiscard]] const Stream& stream() const { return stream_; }
  [[nodiscard]] Peers& peers() { return *peers_; }
  [[nodiscard]] int self() const { return topology_.domain_index; }
  [[nodiscard]] int domain_index(int rank) const { return topology_.index_here(rank); }
  [[nodiscard]] SharedControl& control(int index) const {
    return *controls_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] OwnEvents& events() { return *events_; }
  /// Returns where a rank's tensor is, in this process.
  std::byte* address(const CallContext& site, int index, std::uint64_t location);
  void release_later(std::uint64_t sequence, std::uint64_t location);
  /// Returns why this rank had no place for a tensor.
  [[nodiscard]] std::string refusal() {
    const std::lock_guard lock(mutex_);
    return refusal_;
  }

 private:
  void release_over();
  void note_refusal(const std::string& words);

  const GpuApi& table_;
  const int device_;
  Board& board_;
  const Topology topology_;
  const std::vector<SharedControl*> controls_;
  const SharedGpuOptions options_;
  const std::shared_ptr<DevicePool> pool_;
  const std::shared_ptr<Peers> peers_;
  Stream stream_;
  const std::shared_ptr<OwnEvents> events_;
  bool failed_ = false;
  bool is_stuck_ = false;  ///< the stream has not ended what it did, in `abort`
  struct Deferred {
    std::uint64_t sequence, location;
  };
  std::mutex mutex_;  // of the rest
  std::vector<Deferred> deferred_;
  std::string refusal_;
};

}  // namespace hvd::gpu
