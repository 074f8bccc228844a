#pragma once
/// StoreClient is a rank's connection to the store. Its calls wait without spinning; they are for one thread at a time. It fails with
/// RankFailed or what else the server says, with RankFailed of rank 0 where the server has gone, and stays failed.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "hvd/errors.h"
#include "ops/rendezvous/frames.h"
#include "ops/rendezvous/sockets.h"

namespace hvd {

/// The result of an attempt to connect.
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
/// Connects, and finds out who is there. Waits until `deadline` at most for a proof that it is a store of this key, and then until
/// `patience` for what that says: it has taken this one for a rank, perhaps, and would miss it.
Attempt try_to_meet(const SocketAddress& address, const Hello& hello, const Digest& key, Deadline deadline, Deadline patience);

class StoreClient {
 public:
  /// `made`: an attempt that was welcome.
  explicit StoreClient(Attempt made);

  /// Returns when all ranks are there. Throws what the server says, or BackendError when it says nothing until `deadline`.
  void wait_for_all(Deadline deadline);
  /// Returns every rank's bytes, by rank. `look` is called some times a second, and may throw.
  std::vector<Bytes> allgather(const Bytes& mine, int size, const std::function<void()>& look);
  void put(const std::string& key, const Bytes& value, int takers);
  /// Returns the value that another rank puts; none when `give_up` says so, and then it can be asked for again.
  std::optional<Bytes> get(const std::string& key, const std::function<bool()>& give_up);
  [[nodiscard]] const std::string& broken() const { return broken_; }

 private:
  void send(FrameKind kind, std::span<const std::byte> payload);
  /// Returns the next frame that is none of another call; none after a moment without one.
  std::optional<Frame> receive();
  [[noreturn]] void fail(const Status& status);
  [[noreturn]] void fail_lost();

  FileDescriptor connection_;
  FrameReader in_;
  std::set<std::string> asked_;
  std::unordered_map<std::string, Bytes> values_;
  std::string broken_;
};

}  // namespace hvd
