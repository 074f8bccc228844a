#pragma once
/// LocalEvents are the news of a domain's log for the other domains; UnsaidEvents has those that
/// wait to be said. Values without a lock, of the thread that drives the leader.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// One piece of news of a domain's log for the other domains. They have the log's order.
struct LocalEvent {
  enum class Kind : std::uint8_t { Introduced, Ready, Joined, Left, Doubted, Removed, Lingering };
  Kind kind = Kind::Introduced;
  UnitKey key = {};  ///< Introduced, Ready, Doubted; of Joined and Removed the process set alone
  int rank = -1;     ///< Introduced, Joined, Left
  SharedSignature signature = {};  ///< Introduced
  Agreement what = {};             ///< Ready
  Pledges pledges = {};            ///< Left
  int change = 0;                  ///< Lingering: as Outcomes has it
};

/// Events that wait. A tensor that is ready waits for its number, and is passed by others that are
/// ready. But that a rank has joined or left means that everything it was ready for has been said:
/// this passes nothing, and nothing that comes after passes it. A query (Doubted) passes what is
/// ready: a tensor that was refused while a batch of it was still to be cut here has no number any
/// more and gets none, and the answer to the query is what ends it.
class UnsaidEvents {
 public:
  void add(LocalEvent event) { events_.push_back(std::move(event)); }
  [[nodiscard]] bool is_empty() const { return events_.empty(); }
  /// Takes out one by one those whose turn it is, and calls `say` with each, which may drop others.
  /// `has_number`: the tensor's number is known, and holds.
  void say_all(const std::function<bool(const UnitKey&)>& has_number,
               const std::function<void(const LocalEvent&)>& say);
  /// Forgets that the domain is ready for the tensor.
  void drop_ready(const UnitKey& key);
  void forget_set(int process_set);

 private:
  std::vector<LocalEvent> events_;
};

}  // namespace hvd
