#pragma once
/// This header has NCCL communicators, one per set of ranks and stream, made at first use and
/// aborted together. They are for the thread that has the turn. They fail by throwing BackendError
/// and then are good for nothing but being aborted.
///
/// A communicator ends by ncclCommAbort, never by ncclCommDestroy: the latter waits for the other
/// ranks of the node, which a destructor must not do. So a healthy world is destroyed only after
/// its ranks have agreed to end, every batch of every rank being done.
// Tested in tests/ops/gpu/nccl/nccl_failure_test.cc, tests/gpu/nccl_gpu_test.cc

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "ops/gpu/api/call.h"

namespace hvd::gpu {

/// Blocking broadcast of bytes from the first of a communicator's ranks to the others; each of them
/// calls it, when the communicator is made. `mine` is empty except on the first rank; returns the
/// first rank's bytes. May throw.
using IdBroadcast = std::function<Bytes(Bytes mine)>;

/// Patience says how long, and for what, a call that is not answered is waited for.
struct Patience {
  /// Other ranks may be this much late to a communicator's first call. More: a rank that never
  /// comes is noticed later.
  std::chrono::milliseconds limit = std::chrono::minutes(5);
  /// True ends the wait at once: the world has failed. Called often; may be empty.
  std::function<bool()> interrupted;
  /// Aborting communicators is waited for so long, milliseconds. More: a failure is told later
  /// where NCCL hangs in it.
  std::chrono::milliseconds abort_limit = std::chrono::seconds(10);
  /// Calls do not block inside NCCL, where nothing could interrupt them. NCCL starts a thread per
  /// call for it.
  bool nonblocking = true;
};

class Communicator {
 public:
  /// Waits for the other ranks of the communicator. `name`: what NCCL calls it.
  Communicator(const CallContext& site, const Patience& patience, int ranks, const NcclUniqueId& id,
               int rank, std::string name);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  NcclComm* get() const { return comm_; }
  int ranks() const { return ranks_; }
  /// Returns whether it has been aborted, by `abort` or as a failure.
  bool aborted() const { return comm_ == nullptr; }

  /// For the result of a call on this communicator: waits until it is no longer in progress; fails
  /// unless it has succeeded.
  void settle(const CallContext& site, NcclCode code, std::string_view call) const;
  /// Fails if NCCL has met an error since; also if the communicator was aborted.
  void check_async(const CallContext& site) const;

  /// Ends what is under way, local to this rank; gives up after the patience's `abort_limit`.
  /// Idempotent.
  void abort() noexcept;
  /// For who aborts it, and others at once.
  [[nodiscard]] NcclComm* release() noexcept { return std::exchange(comm_, nullptr); }

 private:
  const GpuApi* table_;
  int device_;
  const Patience* patience_;
  int ranks_;
  const std::string name_;
  NcclComm* comm_ = nullptr;
};

/// An AbortMark is a word of host memory that says, before the first communicator is aborted, that
/// what NCCL's kernels leave from then on is not to be trusted. The device reads it behind each
/// batch (PoisonJob in kernels/kernels.h): ncclCommAbort makes a kernel leave with its work half
/// done, and its stream, and the user's that waits for it, go on. A kernel that leaves still tells
/// its peers that it has sent, so kernels of other ranks end as if all were well: the word is one
/// for the ranks that share memory, and who aborts first marks it for all. A rank whose device
/// cannot read the shared word has one of its own, too, which nobody else marks. For the thread
/// that has the turn.
class AbortMark {
 public:
  /// What CUDA registers of the shared word: the word is the first of so many bytes that are
  /// registered for nothing else.
  static constexpr std::size_t kSharedBytes = 4096;

  /// `shared`: the ranks' common word, which outlives this; null: there is none.
  AbortMark(const GpuApi& table, int device, std::uint32_t* shared)
      : table_(table), device_(device), shared_(shared) {}
  AbortMark(const AbortMark&) = delete;
  AbortMark& operator=(const AbortMark&) = delete;

  /// Returns where the device reads the word, which is registered or made at first use; fails with
  /// BackendError.
  const std::uint32_t* get(const CallContext& site);
  void set() noexcept;
  /// Returns whether it is set, by any of the ranks.
  [[nodiscard]] bool is_set() const noexcept;
  /// Lets go of the word, for a device that has come to rest; nothing is launched any more. Without
  /// it the word stays with the process.
  void close() noexcept;

 private:
  [[nodiscard]] bool register_shared() noexcept;

  const GpuApi& table_;
  const int device_;
  std::uint32_t* const shared_;
  bool registered_ = false;
  std::uint32_t* own_ = nullptr;
  const std::uint32_t* read_ = nullptr;  ///< by the device
};

class Communicators {
 public:
  /// `abort_word`: of AbortMark.
  Communicators(const GpuApi& table, int device, Patience patience, std::uint32_t* abort_word);
  ~Communicators() { end(); }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  /// Returns the communicator of these global ranks, of which this is `ranks[rank]`, for one of the
  /// streams (`track`); made at first use, together with the other ranks.
  std::shared_ptr<Communicator> of(const CallContext& site, const std::vector<int>& ranks, int rank,
                                   int track, const IdBroadcast& exchange);
  /// Something has failed: `of` fails ever after. Nothing is aborted yet: first the failure is to
  /// be told.
  void refuse() noexcept { failed_ = true; }
  /// Sets the mark, and then aborts all at once, because aborting one may wait for the device,
  /// which may wait for another. Gives up after the patience's `abort_limit`. Idempotent; `of`
  /// fails ever after.
  void abort_all() noexcept;
  /// The same; what is left is trusted, unless something has failed: for ranks that have agreed to
  /// end.
  void end() noexcept;
  void require_alive(const CallContext& site) const;
  bool failed() const { return failed_; }
  /// Returns the mark, which is set before any of them is aborted.
  AbortMark& mark() { return mark_; }

 private:
  NcclUniqueId agree_on_id(const CallContext& site, int first, bool is_first,
                           const IdBroadcast& exchange) const;

  const GpuApi& table_;
  const int device_;
  const Patience patience_;
  AbortMark mark_;
  std::map<std::pair<int, std::vector<int>>, std::shared_ptr<Communicator>> by_ranks_;  // and track
  bool failed_ = false, aborted_ = false;
};

}  // namespace hvd::gpu
