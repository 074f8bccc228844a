#pragma once
/// Bootstrap is how a process finds the others before there is an engine: through MPI, which it starts or adopts, or as a world of its own.
/// Everything here is collective over all ranks and happens inside `init()`, in the caller's thread; the blocking calls of MPI are for this
/// time alone.
/// It owns the communicator, and fails with BackendError, Mismatch or InvalidArgument.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "hvd/base/wire.h"
#include "hvd/config.h"
#include "hvd/topology.h"
#include "ops/mpi/call.h"
#include "ops/shm/arena.h"

namespace hvd {

class Bootstrap {
 public:
  /// Starts MPI if a launcher started this process and nobody did. Throws BackendError if the launcher and MPI disagree about the
  /// number of ranks: then the program was built for another MPI, and would run as so many worlds of one.
  Bootstrap();

  [[nodiscard]] bool has_mpi() const { return comm_.get() != MPI_COMM_NULL; }
  [[nodiscard]] bool threads_supported() const { return threads_supported_; }
  [[nodiscard]] const MpiComm& comm() const { return comm_; }
  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }

  /// Returns every rank's bytes, by rank.
  [[nodiscard]] std::vector<Bytes> allgather(const Bytes& mine) const;
  /// Throws Mismatch on every rank if a setting (its name, its value) is not the same on all: names those that differ, with their values
  /// by rank.
  void require_equal(const std::vector<std::pair<std::string, std::string>>& settings) const;
  /// For a step that may fail on some ranks: throws on every rank if `problem` is not empty on one, with its text.
  void agree_on_success(const std::string& problem, const std::string& what) const;

  /// Returns who is where. Domains are hosts; `share_memory` turns them into what ranks share memory.
  [[nodiscard]] Topology find_hosts() const;
  /// Maps the board and the arenas of this host's ranks. Where a host refuses, or `config` says so, each of its ranks becomes a domain
  /// of its own, with private memory; `topology` then says so, on all ranks alike. Returns why, empty if all hosts share.
  std::string share_memory(const Config& config, Topology& topology, DomainMemory& memory) const;

  /// For the thread that has the turn: the first of `ranks` gives `mine` to the others, who pass nothing. Waits without spinning, until
  /// `give_up`, which then ends it with BackendError; what a set of ranks with the same first one is given under one tag comes in order.
  [[nodiscard]] Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                      const std::function<bool()>& give_up) const;
  /// Returns when all ranks have called it. Waits without spinning.
  void barrier() const;

 private:
  void send_to_others(const std::vector<int>& ranks, const Bytes& mine, int mpi_tag, const std::function<bool()>& give_up) const;
  [[nodiscard]] std::string try_to_share(const Config& config, const Topology& topology, const MpiComm& host, DomainMemory& memory) const;
  MpiComm comm_;
  bool threads_supported_ = false;
};

/// Finalizes MPI if this library started it and nobody has.
void finalize_mpi();

}  // namespace hvd
