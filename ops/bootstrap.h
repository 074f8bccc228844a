#pragma once
/// Bootstrap is how a process finds the others before there is an engine: through MPI, which it starts or adopts, or as a world of its own.
/// Everything here is collective over all ranks and happens inside `init()`, in the caller's thread; the blocking calls of MPI are for this
/// time alone.
/// A rank that fails where others do not takes part in their next `allgather` by `fail`, which then throws there: so every call of MPI that
/// has no such way out stands behind an `allgather`. A rank of this host that dies meanwhile is RankFailed on all; MPI is then of no more
/// use to hvd.
/// It owns the communicator, and fails with BackendError, Mismatch, InvalidArgument or RankFailed.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "hvd/base/wire.h"
#include "hvd/config.h"
#include "hvd/errors.h"
#include "hvd/topology.h"
#include "ops/bootstrap_peers.h"
#include "ops/mpi/call.h"
#include "ops/shm/arena.h"

namespace hvd {

class Bootstrap {
 public:
  /// Starts MPI if a launcher started this process and nobody did. Throws BackendError if the launcher and MPI disagree about the
  /// number of ranks: then the program was built for another MPI, and would run as so many worlds of one.
  Bootstrap();

  [[nodiscard]] bool has_mpi() const { return comm_.get() != MPI_COMM_NULL; }
  [[nodiscard]] bool threads_supported() const { return level_ == MPI_THREAD_MULTIPLE; }
  /// Whether MPI may be called by one thread at a time, whichever that is, and not by several at once.
  [[nodiscard]] bool is_serialized() const { return level_ == MPI_THREAD_SERIALIZED; }
  [[nodiscard]] const MpiComm& comm() const { return comm_; }
  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }

  /// Not collective: what an `init()` calls first. Throws BackendError if MPI has ended, or cannot be used any more.
  void begin();
  /// Not collective: `work` is done when the program calls MPI_Finalize, while MPI still works. The first time only.
  void before_finalize(std::function<void()> work) const;

  /// Returns every rank's bytes, by rank. Throws what a rank has given `fail` instead of taking part.
  [[nodiscard]] std::vector<Bytes> allgather(const Bytes& mine) const;
  /// Returns when all ranks have come here; throws what a rank has given `fail`.
  void agree() const { static_cast<void>(allgather({})); }
  /// This rank leaves `init()` with an error: throws it on the others, in their next `allgather`. Does nothing where they know already.
  void fail(const Status& status) const noexcept;
  /// Throws Mismatch on every rank if a setting (its name, its value) is not the same on all: names those that differ, with their values
  /// by rank.
  void require_equal(const std::vector<std::pair<std::string, std::string>>& settings) const;
  /// Not collective. Throws BackendError, which says what to do, if MPI may not be called by other threads than the one that started it.
  void require_threads() const;

  /// Returns who is where. Domains are hosts; `share_memory` turns them into what ranks share memory.
  [[nodiscard]] Topology find_hosts() const;
  /// Maps the board and the arenas of this host's ranks. Where a host refuses, or `config` says so, each of its ranks becomes a domain
  /// of its own, with private memory; `topology` then says so, on all ranks alike. Returns why, empty if all hosts share.
  std::string share_memory(const Config& config, Topology& topology, DomainMemory& memory) const;

  /// Finds out whether the ranks of each domain may read one another's ordinary memory, and notes it in `memory`: the same on all ranks of
  /// a domain. Returns why this rank's domain may not, as the first rank that says so has found; empty if it may, or shares no memory.
  std::string find_direct_copies(const Config& config, const Topology& topology, DomainMemory& memory) const;

  /// For the thread that has the turn: the first of `ranks` gives `mine` to the others, who pass nothing. Waits without spinning, until
  /// `give_up`, which then ends it with BackendError; what a set of ranks with the same first one is given under one tag comes in order.
  [[nodiscard]] Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                      const std::function<bool()>& give_up) const;
  /// Returns when all ranks have called it. Waits without spinning. Throws RankFailed if one of this host has died before.
  void barrier() const;

 private:
  struct Exchange;
  [[nodiscard]] std::vector<Bytes> exchange(const Bytes& mine, std::vector<bool>& failed, bool is_failure) const;
  /// Waits for the end of a collective call. Throws RankFailed if a rank has died.
  void finish(MPI_Request& request, std::string_view call) const;
  [[nodiscard]] std::string find_loss() const;
  void tell_loss() const;
  void send_to_others(const std::vector<int>& ranks, const Bytes& mine, int mpi_tag, const std::function<bool()>& give_up) const;
  [[nodiscard]] std::string try_to_share(const Config& config, const Topology& topology, const MpiComm& host, DomainMemory& memory) const;
  MpiComm comm_;
  int level_ = MPI_THREAD_SINGLE;
  Peers peers_;
  mutable bool knows_failure_ = false;  ///< of another rank, in this `init()`
  mutable std::string broken_;          ///< why a collective call has not come to its end
};

/// Finalizes MPI if this library started it and nobody has.
void finalize_mpi();

}  // namespace hvd
