#pragma once
/// NcclBackend is the Backend (hvd/backend.h) for tensors on GPUs, one rank per GPU: allreduce,
/// broadcast, allgather, alltoall and reducescatter by NCCL on a stream of its own. It is for the
/// thread that has the turn. It owns the stream, the communicators and the fusion buffer, all made
/// at first use: a process that never sends a GPU tensor never touches its GPU. It fails with
/// BackendError naming call, rank, tensors and NCCL's words; every later launch fails too. It
/// aborts nothing by itself: who catches the error tells the world first, and then calls `abort`,
/// as other ranks' kernels end with what an abort leaves. It must be destroyed after the ranks have
/// agreed to end (see communicator.h) or after `abort`; its executions before or after.
///
/// The host is never blocked for the device. The stream waits for the members' events, then pack,
/// NCCL, unpack and the completion event follow in stream order, and so does the next batch of the
/// stream, which is what lets batches in flight share its fusion buffer. With several streams, each
/// with its own communicators and buffer, the batches of a process set go to them in turn, by their
/// order in the set, which is the same on all its ranks: the pack of a batch then overlaps the
/// reduction of the one before, which its own reduction follows.
///
/// Gradients may live in memory that it lends (`allocate`): they are then reduced where they are,
/// without pack and unpack.
///
/// Ranks that have joined are left out, by a communicator of those that have not; their zeros count
/// where they change something.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "hvd/backend.h"
#include "hvd/negotiation/board/board.h"
#include "ops/gpu/api/gpu_api.h"
#include "ops/gpu/api/handles.h"
#include "ops/gpu/nccl/collectives.h"
#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/memory.h"

namespace hvd::gpu {

/// Blocking broadcast of bytes from the first rank of the set to its other ranks; every rank of the
/// set calls it, at its first use of the set on each stream, on the thread that has the turn; by
/// levels for the parts of the set that then take its place. `mine` is empty except on the first
/// rank; returns the first rank's bytes. May throw an Error.
using UniqueIdExchange = std::function<Bytes(const ProcessSetInfo& set, Bytes mine)>;

/// Returns the question whether the world has failed, which ends a wait inside NCCL. It is asked
/// often; ten times a second it looks whether a rank of the domain has died: while the thread that
/// has the turn waits, nobody else of this rank does, and where all that live wait so, nobody would
/// find it. `board` outlives the question; one thread at a time asks each copy.
std::function<bool()> world_has_failed(Board& board);

struct NcclOptions {
  Patience patience;
  /// Up to here the fusion buffer grows generously: the planner's fusion threshold. Higher: more
  /// device memory held.
  std::size_t fusion_threshold_bytes = std::size_t{128} << 20;
  /// The registration of the fusion buffers, equal on all ranks. With one, nothing is lent (see
  /// memory.h): all that travels fused is packed. `Window` needs the table's `window_register`.
  Registration registration = Registration::None;
  /// NCCL sums, and scales nothing, as over windows in any case: for GPUs whose switches sum. Equal
  /// on all ranks.
  bool sums_only = false;
  /// Streams that batches go to in turn.
  int streams = 1;
  /// Returns whether this backend works for the set; pure. Empty: for all.
  std::function<bool(const ProcessSetInfo& set)> takes;
  /// The host of each rank, by its global rank: sums across hosts that have equally many of a
  /// batch's ranks, more than one, are then made on each host first (the levels of collectives.h).
  /// Empty: as NCCL thinks best.
  std::vector<int> host_of_rank;
  /// `abort` and the destructor wait so long for the stream to run dry: nothing is written then to
  /// tensors that the caller gets back, and no memory is freed under a kernel. NCCL's kernels end
  /// with their communicator; only a stuck kernel of the user's makes it last.
  std::chrono::milliseconds rest_limit = std::chrono::seconds(2);
  /// A word that the ranks which share memory have in common, zero at first, at the beginning of
  /// AbortMark::kSharedBytes that are registered with CUDA by nobody else; outlives the backend.
  /// Null: a failure is marked for this rank alone.
  std::uint32_t* abort_word = nullptr;
  /// If it is not empty, it is told what fusion buffers and their registrations take of the GPU's
  /// memory, which is then measured.
  Remark remark;
};

class NcclBackend : public Backend {
 public:
  /// `table` outlives the backend and its executions. `device`: CUDA's index of this rank's GPU.
  /// Calls nothing yet.
  NcclBackend(const GpuApi& table, int device, UniqueIdExchange exchange, NcclOptions options = {});
  ~NcclBackend() override;

  std::string_view name() const override { return "nccl"; }
  /// On Cuda devices: allreduce as `reduce_supported` says, reducescatter likewise (Sum and
  /// Average), the others of every type. Not Adasum.
  bool supports(const BatchTraits& traits) const override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  bool keeps_order() const override { return true; }
  /// Null also for a rank alone, which reduces nothing, for another device than this rank's, and
  /// where the fusion buffer is registered.
  std::shared_ptr<void> allocate(const BatchTraits& traits, std::size_t bytes) override;
  /// Afterwards the stream has no more work, unless a user's kernel holds it up for longer than
  /// `rest_limit`, or NCCL hangs.
  bool abort() noexcept override;

 private:
  /// A Track is what a batch in flight shares with no batch but those before it.
  struct Track {
    Stream stream;
    std::map<std::vector<int>, FusionBuffer>
        fusion;  ///< by the ranks whose window it is; the others share one
  };
  LaunchContext launch_context_of(const CallContext& site, const Batch& batch);
  void enqueue(const LaunchContext& context, const Batch& batch);
  bool comes_to_rest() noexcept;

  const GpuApi& table_;
  const int device_;
  const UniqueIdExchange exchange_;
  const NcclOptions options_;
  std::shared_ptr<Communicators> communicators_;
  std::shared_ptr<LentMemory> lent_;
  std::vector<std::unique_ptr<Track>> tracks_;
  LaunchOrder order_;      ///< of what NCCL does on all of them
  bool is_stuck_ = false;  ///< a stream has not ended what it did, in time
};

}  // namespace hvd::gpu
