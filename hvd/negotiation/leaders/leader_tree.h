#pragma once
/// The leader tree, through which the domains of a world agree. The leaders form a binomial tree
/// with domain 0 at its root. Upwards flow introductions (once per tensor and rank) and readiness
/// (one number per tensor, when a whole subtree is ready); downwards flow the introductions of all
/// ranks and the root's decisions: what is agreed, what can never be because a rank has left, and
/// where a batch is cut. A step costs each leader a message per neighbour and per group of tensors
/// that became ready together, in O(log domains) hops; nothing is gathered at the root but one
/// number per tensor and child. Introductions that a leader passes on together and that say the
/// same travel as one, with the list of their ranks. Ranks that have joined are waited for no more;
/// the leaders learn of them on the way up, after what their domains were ready for without them.
/// When all ranks have left, with no send or recv pending, and the root has decided what came
/// before, it says so: the end.
///
/// The state is in parts: LeaderLinks (place in the tree, what is to be sent), LeaderInbox (what
/// comes, and what of it waits), UnsaidEvents, TensorNumbers, ReadinessCounts, LeaderDecisions.
/// Here is what happens between them. Run by the leader's driver. Fails by throwing BackendError
/// (wire) or WireError (a malformed message).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/negotiation/board/local_events.h"
#include "hvd/negotiation/leaders/leader_actions.h"
#include "hvd/negotiation/leaders/leader_decisions.h"
#include "hvd/negotiation/leaders/leader_inbox.h"
#include "hvd/negotiation/leaders/leader_links.h"
#include "hvd/negotiation/leaders/leader_messages.h"
#include "hvd/negotiation/leaders/tensor_numbers.h"
#include "hvd/negotiation/table/readiness_counts.h"
#include "hvd/transport.h"

namespace hvd {

class LeaderTree {
 public:
  /// `capacity`: how many tensors are remembered that nobody waits for; beyond it those go that
  /// were not decided for longest.
  LeaderTree(Transport& transport, LeaderTreeActions actions, std::size_t capacity = 4096);
  LeaderTree(const LeaderTree&) = delete;
  LeaderTree& operator=(const LeaderTree&) = delete;

  /// Returns the domains whose leaders `domain`'s has messages with: its parent and its children.
  [[nodiscard]] static std::vector<int> neighbours_of(int domain, int domains) {
    return LeaderLinks::neighbours_of(domain, domains);
  }
  /// Returns the message that the world has failed, as any rank may send it to any leader.
  [[nodiscard]] static Bytes failure_message(const Status& status) {
    return LeaderItems::message_of(LeaderItems::fail(status));
  }

  // ---- what this domain has to say; the next `advance` sends it
  void tell(LocalEvent event);
  /// The set's ranks here have waited long under the name, each for an operation of its own.
  void stuck(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks) {
    decisions_.stuck(process_set, name, stuck_ranks);
  }
  /// These ranks of this domain are blocked (hvd/negotiation/table/deadlock.h), or no more. The
  /// root then ends what can never end.
  void blocked(BlockedReport report) {
    if (!failed_) decisions_.blocked(std::move(report));
  }
  /// An operation of a rank of this domain has not ended by its deadline. The root then ends the
  /// world, if there are ranks that have not submitted it; to be said again and again, as what was
  /// said before may be on its way.
  void late(LateReport report) {
    if (!failed_) decisions_.late(std::move(report), links_.self());
  }
  void failed(const Status& status);
  /// Tells this domain's log again what the ranks of the others said of a forgotten tensor.
  void retell(const UnitKey& key);
  /// Root: tells all other domains that the set's next batches are cut.
  void announce_cut(int process_set) { links_.send_down(LeaderItems::cut(process_set)); }
  /// Others: tells the root that so many cuts of the set are over in this domain.
  void tell_credit(int process_set, int domain, std::uint64_t over) {
    links_.send_up(LeaderItems::credit(process_set, domain, over));
  }
  /// Root: returns whether all ranks have left, with no send or recv pending, and what they were
  /// ready for is decided.
  [[nodiscard]] bool all_left() const {
    return decisions_.departed() == actions_.ranks_of(0)->size() && lingering_ == 0;
  }
  /// Root: tells all other domains so, once what is decided is cut.
  void announce_end() { links_.send_down(LeaderItems::end()); }

  /// Sends what has gathered and acts on what has arrived. True if there was anything.
  bool advance();
  /// Sends what has gathered. True if there was anything.
  bool send();
  /// Acts on what has arrived; what to send gathers until `advance`. True if there was anything.
  bool hear();
  [[nodiscard]] bool is_root() const { return links_.is_root(); }
  /// Ranks in those parts of this leader's subtree that are not ready for what another part of it
  /// is ready for: some of them hold it up.
  [[nodiscard]] std::vector<int> awaited(const UnitKey& key) const;
  /// Returns the tensor's number, if it has one that holds for sure.
  [[nodiscard]] std::optional<std::uint32_t> number_of(const UnitKey& key) const {
    return numbers_.is_unsure(key) ? std::nullopt : numbers_.find(key);
  }
  [[nodiscard]] const UnitKey* key_of(std::uint32_t number) const {
    return numbers_.key_of(number);
  }
  [[nodiscard]] const TensorNumbers::Names& ambiguous_names() const {
    return numbers_.ambiguous_names();
  }
  /// A round of the number has ended without a decision.
  void note_use(std::uint32_t number) { numbers_.note_use(number); }
  /// Tensors that this leader remembers.
  [[nodiscard]] std::size_t tensors_kept() const { return numbers_.count(); }
  /// Process sets and names of which it remembers more than their tensors.
  [[nodiscard]] std::size_t sets_and_names_kept() const {
    return counts_.sets_kept() + decisions_.names_kept();
  }
  /// Some domain of this leader's subtree is ready for something that is not decided yet.
  [[nodiscard]] bool is_waiting() const {
    return !counts_.is_empty() || !unsaid_.is_empty() || inbox_.is_waiting();
  }

 private:
  // ---- what this domain says
  void introduced(const UnitKey& key, int rank, const SharedSignature& signature);
  void say_unsaid();
  void say(const LocalEvent& event);
  void count_lingering(int change);

  // ---- what the others say
  bool act_on(const Bytes& item, int from, bool passed_on);
  void act_on_upward(LeaderItem item, Reader& reader, const Bytes& bytes, int from);
  bool act_on_downward(LeaderItem item, Reader& reader, const Bytes& bytes, int from,
                       bool passed_on);
  void receive_introduction(Introduction introduction, bool from_parent);
  void receive_ready(Reader& reader, int from);
  void receive_agreement(Reader& reader, const Bytes& item, bool passed_on);
  void receive_leaving(Reader& reader, int from);
  void receive_failure(Reader& reader, const Bytes& item, int from);
  void receive_blocked(Reader& reader, const Bytes& item);
  void receive_late(Reader& reader, int from);
  [[nodiscard]] bool expect_ranks(int process_set, const Runs& runs) const;

  LeaderLinks links_;
  LeaderInbox inbox_;
  LeaderTreeActions actions_;
  UnsaidEvents unsaid_;
  TensorNumbers numbers_;
  ReadinessCounts counts_;
  LeaderDecisions decisions_;
  int lingering_ = 0;  // root: ranks that leave with sends or recvs pending
  bool failed_ = false;
};

}  // namespace hvd
