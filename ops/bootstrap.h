#pragma once
/// Bootstrap is how the ranks of a world find one another before there is an engine, and agree:
/// through MPI, through a store, or as a world of one. Everything here is collective over them and
/// happens while the world is made, in the caller's thread. A rank that fails where others do not
/// takes part in their next `allgather` by `fail`, which then throws there: so every call of MPI
/// that has no such way out stands behind an `allgather`. A rank that dies meanwhile is RankFailed
/// on all who wait for it; the way by which they met is then of no more use to hvd. It fails with
/// BackendError, Mismatch, InvalidArgument or RankFailed.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "hvd/base/wire.h"
#include "hvd/config.h"
#include "hvd/errors.h"
#include "hvd/topology.h"
#include "ops/p2p/point_to_point.h"
#include "ops/rendezvous/meeting.h"
#include "ops/shm/memory/arena.h"

namespace hvd {

class MpiMeeting;
struct Launch;

class Bootstrap {
 public:
  /// Finds the others as the environment says (hvd/launch/launch.h): those that meet in a store
  /// have `patience` to come. Throws BackendError if a launcher has announced ranks that are not to
  /// be found: the program would run as so many worlds of one.
  explicit Bootstrap(std::chrono::milliseconds patience = std::chrono::seconds(60));
  /// The others are those of `meeting`.
  explicit Bootstrap(std::unique_ptr<Meeting> meeting) : meeting_(std::move(meeting)) {}

  /// Returns whether this is a world of one, which nobody else can know of.
  [[nodiscard]] bool is_alone() const { return meeting_ == nullptr; }
  /// Returns MPI, where the ranks met through it; otherwise null.
  [[nodiscard]] const MpiMeeting* mpi() const { return mpi_; }
  /// Returns whether the ranks met in a store.
  [[nodiscard]] bool is_in_store() const { return meeting_ != nullptr && mpi_ == nullptr; }
  [[nodiscard]] int rank() const { return meeting_ ? meeting_->rank() : 0; }
  [[nodiscard]] int size() const { return meeting_ ? meeting_->size() : 1; }

  /// Begins an `init()`, which calls it first. Not collective. Throws BackendError if MPI has
  /// ended, or the ranks cannot meet any more.
  void begin();

  /// Returns every rank's bytes, by rank. Throws what a rank gave `fail` instead.
  [[nodiscard]] std::vector<Bytes> allgather(const Bytes& mine) const;
  /// Returns when all ranks have come here; throws what a rank has given `fail`.
  void agree() const { static_cast<void>(allgather({})); }
  /// This rank leaves `init()` with an error: throws it on the others, in their next `allgather`.
  /// Does nothing where they know already.
  void fail(const Status& status) const noexcept;
  /// Returns whether the ranks can still meet: none has died while others waited for it here.
  [[nodiscard]] bool is_whole() const;
  /// Throws Mismatch on every rank if a setting (its name, its value) is not the same on all: names
  /// those that differ, with their values by rank.
  void require_equal(const std::vector<std::pair<std::string, std::string>>& settings) const;
  /// Returns who is where. Domains are hosts; `share_memory` makes them what shares memory.
  [[nodiscard]] Topology find_hosts() const;
  /// Maps the board and the arenas of this host's ranks. Where a host refuses, or `config` says so,
  /// each of its ranks becomes a domain of its own, with private memory; `topology` then says so,
  /// on all ranks alike. Returns why, empty if all hosts share.
  std::string share_memory(const Config& config, Topology& topology, DomainMemory& memory) const;

  /// Finds out whether the ranks of each domain may read one another's ordinary memory, and notes
  /// it in `memory`: the same on all ranks of a domain. Returns why this rank's domain may not, as
  /// the first rank that says so has found; empty if it may, or shares no memory.
  std::string find_direct_copies(const Config& config, const Topology& topology,
                                 DomainMemory& memory) const;

  /// Does what Meeting::give_from_first does; in a world of one returns `mine`. For the thread that
  /// has the turn.
  [[nodiscard]] Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                      const std::function<bool()>& give_up) const;
  /// Returns when all ranks have called it. Waits without spinning. Throws RankFailed if one of
  /// this host has died before.
  void barrier() const;

 private:
  /// Returns whether the ranks have met, or there is one; false where they are to meet in a store.
  bool meet_through_mpi(const Launch& launch, bool is_started);
  std::unique_ptr<Meeting> meeting_;    ///< null in a world of one
  MpiMeeting* mpi_ = nullptr;           ///< the same, where it is MPI's
  mutable bool knows_failure_ = false;  ///< of another rank, in this `init()`
};

}  // namespace hvd
