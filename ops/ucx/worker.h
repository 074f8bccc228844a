#pragma once
/// UcxWorker is this rank's end of the wire: it owns UCX's context and worker, and an endpoint for
/// each rank that it has to do with. It knows which ranks have gone: UCX says so of a connection
/// that ends, or that nobody answers any more. A rank also goes when its world has failed, and may
/// then be the first of which that is heard here; so a loss is an error only after a second, in
/// which the leaders can say why. One thread at a time. It fails with BackendError that has UCX's
/// words, and with RankFailed.
// Tested in tests/ops/p2p/transport_test.cc, tests/hvd/engine/leavers_mpi_test.cc

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "hvd/base/wire.h"
#include "ops/ucx/api.h"

namespace hvd {

class UcxWorker {
 public:
  UcxWorker(const UcxApi& api, int rank, int size);
  /// Connections end, whatever is under way.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  /// Returns what others need to reach this worker.
  [[nodiscard]] Bytes address() const;
  /// By rank, what `address` returned there. Comes before all that follows.
  void learn(std::vector<Bytes> addresses);

  [[nodiscard]] const UcxApi& api() const { return api_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] ucp_worker_h get() const { return worker_; }
  /// Returns the endpoint of a rank, made when it is first asked for; null if the rank has gone.
  ucp_ep_h endpoint(int rank);
  void progress();
  /// Returns whether all that was sent has left; after `abandon`, what can leave at once.
  bool flush();
  /// A message was given up: connections may never be empty again.
  void abandon() noexcept { has_abandoned_ = true; }
  /// Holds memory that UCX may touch until this is destroyed.
  void keep(std::shared_ptr<void> memory) noexcept;
  /// A message from or to this rank has failed.
  void lose(int rank, ucs_status_t status);
  /// Returns whether this rank has gone a second ago: nothing of it is on its way any more.
  [[nodiscard]] bool is_given_up(int rank) const;
  /// Throws RankFailed if it has.
  void require(int rank);
  /// Does so for any rank that nothing has been thrown for: afterwards the messages of the others
  /// matter all the more.
  void require_all();
  /// Throws BackendError unless `status` is good.
  void check(ucs_status_t status, std::string_view call) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    UcxWorker* worker = nullptr;
    Bytes address;
    ucp_ep_h endpoint = nullptr;
    bool is_lost = false;
    bool is_told = false;  ///< it was thrown
    ucs_status_t status = UCS_OK;
    Clock::time_point since;
  };
  /// From now on errors are thrown, and what UCX would print of them besides, and of connections
  /// that end, is left out; unless UCX_LOG_LEVEL asks for it. What is wrong with the configuration
  /// has been printed. For good: the level is the process's, and other worlds of it may go on.
  void be_quiet();
  static void lose_endpoint(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  void lose(Peer& peer, ucs_status_t status);
  void close_endpoints() noexcept;

  const UcxApi& api_;
  const int rank_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;  // by rank; stay where they are
  bool any_lost_ = false;
  bool has_abandoned_ = false;
  ucs_status_ptr_t flushing_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace hvd
