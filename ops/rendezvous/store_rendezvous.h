#pragma once
/// StoreRendezvous is the Rendezvous of ranks that met in a store; rank 0 holds the store as well. Collective calls and gifts may come from
/// two threads, one after the other.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "hvd/launch/launch.h"
#include "ops/rendezvous/client.h"
#include "ops/rendezvous/rendezvous.h"
#include "ops/rendezvous/server.h"

namespace hvd {

/// Returns what names the host of this process, as far as its ranks can share memory.
std::string name_of_host();

class StoreRendezvous final : public Rendezvous {
 public:
  /// Collective, when all are there. `server`: rank 0's, null elsewhere.
  StoreRendezvous(int rank, int size, std::unique_ptr<StoreServer> server, StoreClient client);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void begin() override;
  const std::string& broken() const override { return client_.broken(); }
  std::vector<Bytes> allgather(const Bytes& mine) override;
  std::vector<int> find_hosts() override;
  Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag, const std::function<bool()>& give_up) override;

 private:
  void look_for_dead();

  const int rank_;
  const int size_;
  std::unique_ptr<StoreServer> server_;
  std::mutex one_at_a_time_;
  StoreClient client_;
  Peers peers_;
  std::optional<std::pair<int, Deadline>> dead_;           // a rank, and when it may no longer be waited for
  std::map<std::pair<std::vector<int>, int>, int> gifts_;  // how many in this world, by ranks and tag
  std::uint64_t exchanges_ = 0;                            // allgathers that have ended: as many on all ranks
  std::uint64_t world_ = 0;                                // how many had, when this world's init() began
};

/// Collective. Brings the ranks of a job together without MPI: rank 0 opens the store, all connect to it, and say who they are. `launch`
/// says who this rank is and where the store is to be; `patience`: how long all may take to come. Throws InvalidArgument or BackendError,
/// which name the mistake, on all ranks that can be told; ranks that do not come in time are named.
std::unique_ptr<Rendezvous> meet_in_store(const Launch& launch, std::chrono::milliseconds patience);

}  // namespace hvd
