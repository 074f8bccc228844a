#pragma once
/// StoreMeeting is the Meeting of ranks that met in a store; rank 0 holds the store as well.
/// Collective calls and gifts may come from two threads, one after the other; they wait without
/// spinning. It fails with RankFailed or what else the server says, with RankFailed of rank 0 where
/// the server has gone, and stays failed.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "hvd/errors.h"
#include "hvd/launch/launch.h"
#include "ops/rendezvous/frames.h"
#include "ops/rendezvous/meeting.h"
#include "ops/rendezvous/server.h"
#include "ops/rendezvous/sockets.h"

namespace hvd {

/// An Attempt says what came of an attempt to connect.
struct Attempt {
  enum class Result {
    Nobody,    ///< nobody listens there, or says anything
    Stranger,  ///< who listens there is no store
    OtherJob,  ///< a store that has another key
    Complete,  ///< all ranks of the job are there already
    Wrong,     ///< refused: `text` says why
    Welcome,
  };
  Result result = Result::Nobody;
  std::string text;
  FileDescriptor connection;
  FrameReader in;  ///< with what has arrived since
};
/// Connects, and finds out who is there. Waits until `deadline` at most for a proof that it is a
/// store of this key, and then until `patience` for what that says: it has taken this one for a
/// rank, perhaps, and would miss it.
Attempt try_to_meet(const SocketAddress& address, const Hello& hello, const Digest& key,
                    Deadline deadline, Deadline patience);

class StoreMeeting final : public KeyedMeeting {
 public:
  /// `made`: an attempt that was welcome; `patience`: how long the store may take nothing.
  StoreMeeting(int rank, int size, Attempt made,
               std::chrono::milliseconds patience = std::chrono::seconds(60))
      : rank_(rank),
        size_(size),
        patience_(patience),
        connection_(std::move(made.connection)),
        in_(std::move(made.in)) {}
  /// Collective: returns when all ranks are there. Throws what the server says, or BackendError
  /// when it says nothing until `deadline`. `server`: rank 0's, which is taken when all is well;
  /// null elsewhere.
  void start(std::unique_ptr<StoreServer>& server, Deadline deadline);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void begin() override;
  std::vector<Bytes> allgather(const Bytes& mine) override;

 private:
  void put(const std::string& key, std::uint32_t takers, const Bytes& bytes) override;
  std::optional<Bytes> try_take(const std::string& key) override;
  void send(FrameKind kind, std::span<const std::byte> payload);
  /// Returns the next frame that is none of another call; none after a moment without one.
  std::optional<Frame> receive();
  void look_for_dead();

  const int rank_;
  const int size_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<StoreServer> server_;
  FileDescriptor connection_;
  FrameReader in_;
  std::set<std::string> asked_;  // for values
  std::unordered_map<std::string, Bytes> values_;
  // a rank, and when it may no longer be waited for
  std::optional<std::pair<int, Deadline>> dead_;
  // allgathers that have ended: as many on all ranks
  std::uint64_t exchanges_ = 0;
  // how many had, when this world's init() began
  std::uint64_t world_ = 0;
};

/// Collective. Brings the ranks of a job together without MPI: rank 0 opens the store, all connect
/// to it, and say who they are. `launch` says who this rank is and where the store is to be;
/// `patience`: how long all may take to come. Throws InvalidArgument or BackendError, which name
/// the mistake, on all ranks that can be told; ranks that do not come in time are named.
std::unique_ptr<Meeting> meet_in_store(const Launch& launch, std::chrono::milliseconds patience);

}  // namespace hvd
