#pragma once
/// A leader's place in the tree, and the messages to its neighbours there. The leaders form a
/// binomial tree with domain 0 at its root. What is to be sent gathers until `flush`, one message
/// for each neighbour. Introductions that follow one another and say the same become one, with the
/// list of their ranks; they keep their place among the rest: what is said after them does not
/// overtake them, nor they what was said before. By the thread that drives the leader. Throws
/// BackendError when the wire says no.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "hvd/negotiation/leaders/leader_messages.h"
#include "hvd/transport.h"

namespace hvd {

class LeaderLinks {
 public:
  explicit LeaderLinks(Transport& transport);

  /// Returns the domains whose leaders `domain`'s has messages with: its parent and its children.
  [[nodiscard]] static std::vector<int> neighbours_of(int domain, int domains);

  [[nodiscard]] int self() const { return self_; }
  [[nodiscard]] bool is_root() const { return self_ == 0; }
  /// Returns the parent's domain, -1 at the root.
  [[nodiscard]] int parent() const { return parent_; }
  [[nodiscard]] std::size_t children() const { return children_.size(); }
  /// Returns the first domain of the child's subtree that the domain is in; this domain for itself;
  /// -1 outside of this leader's subtree.
  [[nodiscard]] int subtree_of(int domain) const;

  void introduce_up(const Introduction& introduction) { up_.add(introduction); }
  void introduce_down(const Introduction& introduction) { down_.add(introduction); }
  /// Sends to the parent. Not at the root.
  void send_up(const Bytes& item);
  /// Sends to all children but the one whose domain is `except`.
  void send_down(const Bytes& item, int except = -1);
  /// Sends to all leaders, also those that are no neighbours.
  void send_to_all(const Bytes& item);
  /// Sends the message to the children at once, after what has gathered.
  void pass_on(const Bytes& message);
  /// Sends what has gathered. Returns whether there was anything.
  bool flush();
  [[nodiscard]] std::optional<Message> receive() { return transport_.receive(); }

 private:
  struct Child {
    int domain, end;  ///< its subtree is [domain, end)
  };
  /// Introductions that go the same way next, in the order in which each key was first said; of one
  /// key no two that follow one another are equal.
  struct Gathered {
    std::vector<Introduction> list;
    std::map<UnitKey, std::size_t> last;  ///< of each key, in the list
    void add(const Introduction& introduction);
  };
  void write_up();
  void write_down();

  Transport& transport_;
  const int self_;
  int parent_ = -1;
  std::vector<Child> children_;
  Gathered up_, down_;              // to be sent before whatever is sent next
  std::map<int, Writer> outgoing_;  // by domain
};

}  // namespace hvd
