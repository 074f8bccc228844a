#pragma once
/// Store is what the ranks' server knows, without its sockets: who has come, an allgather under
/// way, values that some ranks give to others, and what has ended it all. It is a state machine:
/// ranks come, say something and go; what is to be said to whom is taken from it. It is for one
/// thread. What a rank says against the protocol throws WireError; the server then lets that rank
/// go.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "ops/rendezvous/frames.h"

namespace hvd {

class Store {
 public:
  /// A frame for a rank.
  struct Reply {
    int rank;
    Frame frame;
  };

  explicit Store(int size);

  /// A rank has come, and has proved that it is of the job. Returns why it is not taken, with what
  /// that is; none if it is. Two ranks of one number, or of different sizes, end the meeting while
  /// ranks are missing; afterwards only who comes late is refused.
  std::optional<std::pair<Refusal, std::string>> come(const Hello& hello);
  /// A rank's connection has ended. Who waits for it learns that.
  void leave(int rank);
  /// A rank says something. Throws WireError if it is nothing that a rank may say now.
  void take(int rank, const Frame& frame);
  /// Ends the meeting for all, with `status`.
  void fail(Status status);

  [[nodiscard]] bool is_complete() const { return come_ == static_cast<int>(who_.size()); }
  /// Returns the ranks that have not come, ascending.
  [[nodiscard]] std::vector<int> missing() const;
  /// Returns what is to be said since the last call.
  [[nodiscard]] std::vector<Reply> take_replies() { return std::exchange(replies_, {}); }

 private:
  struct Value {
    Bytes bytes;
    std::uint32_t takers = 0;  ///< who are still to take it
  };
  void gather(int rank, Bytes bytes);
  void put(Reader& reader);
  void get(int rank, std::string key);
  void reply(int rank, FrameKind kind, Bytes payload) {
    replies_.push_back({rank, {kind, std::move(payload)}});
  }

  std::vector<std::string> who_;  // by rank; empty: has not come
  std::vector<bool> here_;        // has a connection
  int come_ = 0;
  std::vector<std::optional<Bytes>> parts_;  // of the allgather under way
  int parts_here_ = 0;
  std::map<std::string, Value> values_;
  std::multimap<std::string, int> waiting_;  // for values: ranks
  Status failed_;
  std::vector<Reply> replies_;
};

}  // namespace hvd
