#pragma once
/// The messages that a leader acts on, in their order. Where its domain has no room for a batch
/// that the root has cut, that cut waits, and with it everything that comes later from the parent:
/// what is decided comes in one order, so a domain that lags behind takes up no more of it until
/// its batches are over. That is the flow control of batches. By the thread that drives the leader.
// Tested in tests/hvd/negotiation/leader_tree_test.cc, tests/fuzz/leader_tree_fuzz.cc

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>

#include "hvd/negotiation/leaders/leader_links.h"

namespace hvd {

class LeaderInbox {
 public:
  /// Acts on an item that comes from the neighbour `from`; `passed_on`: the children have it
  /// already. Returns false, and nothing has happened, if it is a cut for which there is no room.
  using Act = std::function<bool(const Bytes& item, int from, bool passed_on)>;
  LeaderInbox(LeaderLinks& links, Act act) : links_(links), act_(std::move(act)) {}

  /// Acts on as much of the message as there is room for. Throws WireError if it is malformed.
  void receive(const Message& message);
  /// Acts on the first message that waits, if there is room. Returns whether that brought anything.
  bool take_waiting();
  /// Lets an item of this domain or a child, which the parent knows, come after what waits.
  void wait_with(const Bytes& item, int from);
  [[nodiscard]] bool is_waiting() const { return !waiting_.empty(); }
  void clear() { waiting_.clear(); }

 private:
  /// The first begins with a cut.
  struct Waiting {
    Message message;
    std::size_t done = 0;  ///< bytes of it that have been acted on
    bool passed_on =
        false;  ///< the children have all of it already; of an item of `wait_with`: the parent
    bool begun = false;  ///< whether that has been decided
  };
  bool pass_on_decisions(const Message& message);
  void act_on(std::size_t& at, const Message& message, bool passed_on);

  LeaderLinks& links_;
  Act act_;
  std::deque<Waiting> waiting_;
};

}  // namespace hvd
