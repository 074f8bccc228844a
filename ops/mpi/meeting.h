#pragma once
/// MpiMeeting is the Meeting of ranks that a launcher of MPI has started. It starts MPI or adopts
/// it, owns a communicator, and waits in blocking calls for the time of `init()` and the end of
/// `shutdown()` alone. A rank of this host that dies meanwhile is RankFailed on all; MPI is then of
/// no more use to hvd. It fails with BackendError otherwise.
// Tested in tests/ops/bootstrap_mpi_test.cc, tests/system/scripts/starts/process_starts.sh

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/mpi/call.h"
#include "ops/rendezvous/meeting.h"

namespace hvd {

class MpiMeeting final : public Meeting {
 public:
  /// Starts MPI, which `open_mpi` has opened, if nobody has, or adopts it. `rank`: of this process,
  /// for messages. The ranks do not watch each other yet.
  static std::unique_ptr<MpiMeeting> start(int rank);
  /// Collective. From now on a rank of this host that dies is noticed.
  void watch_peers();

  [[nodiscard]] const MpiComm& comm() const { return comm_; }
  [[nodiscard]] bool threads_supported() const { return level_ == MPI_THREAD_MULTIPLE; }
  /// Returns whether MPI may be called by one thread at a time, whichever that is, and not by
  /// several at once.
  [[nodiscard]] bool is_serialized() const { return level_ == MPI_THREAD_SERIALIZED; }
  /// Not collective. Throws BackendError, which says what to do, if MPI may not be called by other
  /// threads than the one that started it.
  void require_threads(std::string_view who) const;
  /// Not collective: `work` is done when the program calls MPI_Finalize, while MPI still works. The
  /// first time only.
  void before_finalize(std::function<void()> work) const;

  /// For the end of a process with status 0 whose world has failed: finalizes MPI, if this library
  /// started it, where all ranks come here within `patience`. Without MPI_Finalize a launcher of
  /// MPI takes the end of a rank for a failure, and kills those that are still to hear of theirs.
  /// Gives up where a rank of this host has died.
  void finalize_if_all_end(std::chrono::milliseconds patience) const noexcept;

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  void begin() override;
  const std::string& broken() const override { return broken_; }
  std::vector<Bytes> allgather(const Bytes& mine) override;
  std::vector<int> find_hosts() override;
  Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                        const std::function<bool()>& give_up) override;

 private:
  struct Exchange;
  MpiMeeting(MpiComm comm, int level) : comm_(std::move(comm)), level_(level) {}
  /// Waits for the end of a collective call. Throws RankFailed if a rank has died.
  void finish(MPI_Request& request, std::string_view call);
  [[nodiscard]] std::string find_loss();
  void tell_loss();
  /// Returns how many ranks, of those that `source` stands for, have said that they end since the
  /// last call; none if one has given up since.
  [[nodiscard]] std::optional<int> take_ends(int source) const;
  void tell_end(int other, bool gives_up) const;
  /// Returns whether all ranks have come here: rank 0 hears it from all, and tells them.
  [[nodiscard]] bool await_ends(std::chrono::milliseconds patience) const;
  void send_to_others(const std::vector<int>& ranks, const Bytes& mine, int mpi_tag,
                      const std::function<bool()>& give_up);

  MpiComm comm_;
  int level_;
  Peers peers_;
  std::string broken_;  ///< why a collective call has not come to its end
};

/// Finalizes MPI if this library started it and nobody has.
void finalize_mpi();

}  // namespace hvd
