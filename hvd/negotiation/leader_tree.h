#pragma once
/// How the domains of a world agree. The leaders form a binomial tree with domain 0 at its root. Upwards flow
/// introductions (once per tensor and rank) and readiness (one number per tensor, when a whole subtree is ready); downwards flow the
/// introductions of all ranks and the root's decisions: what is agreed, what can never be because a rank has left, and where a batch is
/// cut. A step costs each leader a message per neighbour and per group of tensors that became ready together, in O(log domains) hops;
/// nothing is gathered at the root but one number per tensor and child. Introductions that a leader passes on together and that say the
/// same travel as one, with the list of their ranks. Ranks that have joined are waited for no more; the leaders learn of them on the way
/// up, after what their domains were ready for without them. When all ranks have left and the root has decided what came before, it says
/// so: the end. Run by the leader's driver. Fails by throwing BackendError (wire) or WireError (a malformed message).

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "hvd/errors.h"
#include "hvd/negotiation/negotiator.h"
#include "hvd/transport.h"

namespace hvd {

/// What the relay asks of its engine.
struct LeaderTreeActions {
  /// Introduces a tensor to this domain's log for ranks that say the same of it. Of those that are this domain's own the log knows already.
  std::function<void(const UnitKey&, const Runs& ranks, const Signature&)> introduce;
  std::function<void(const UnitKey&, const Agreement&)> agree;
  /// Cuts the next batches of the set here. False, and nothing has happened, if this domain has no room for them yet: it is asked again
  /// later.
  std::function<bool(int process_set)> cut;
  /// Root: so many cuts of the set are over in the domain.
  std::function<void(int process_set, int domain, std::uint64_t over)> credit;
  /// A tensor can never be complete, because the rank has left: whoever waits for it is told.
  std::function<void(const UnitKey&, int rank)> refuse;
  std::function<void(int rank)> leave;
  std::function<void()> end;
  /// All ranks of the set wait under the name, for different operations.
  std::function<void(int process_set, const std::string& name, const std::vector<StuckRank>&)> conflict;
  std::function<void(const Status&)> fail;
  /// Forgets the tensor in this domain's table, unless it is in use there: then returns false.
  std::function<bool(const UnitKey&)> drop;
  /// Returns the ranks of a process set, ascending; null if it was removed. Throws WireError if there never was such a set.
  std::function<const std::vector<int>*(int process_set)> ranks_of;
  std::function<int(int rank)> domain_of;
};

/// What a domain's log says that the other domains are to know, in the log's order.
struct LocalEvent {
  enum class Kind : std::uint8_t { Introduced, Ready, Joined, Left, Doubted, Removed };
  Kind kind = Kind::Introduced;
  UnitKey key = {};                ///< Introduced, Ready, Doubted; of Joined and Removed the process set alone
  int rank = -1;                   ///< Introduced, Joined, Left
  SharedSignature signature = {};  ///< Introduced
  Agreement what = {};             ///< Ready
  Pledges pledges = {};            ///< Left
};

class LeaderTree {
 public:
  /// `capacity`: how many tensors are remembered that nobody waits for; beyond it those go that were not decided for longest.
  LeaderTree(Transport& transport, LeaderTreeActions actions, std::size_t capacity = 4096);

  /// Returns the domains that the leader of `domain` exchanges messages with: its parent and its children.
  [[nodiscard]] static std::vector<int> neighbours_of(int domain, int domains);
  /// Returns the message that says that the world has failed, as any rank may send it to any leader.
  [[nodiscard]] static Bytes failure_message(const Status& status);

  // ---- what this domain has to say; the next `advance` sends it
  void tell(LocalEvent news);
  /// All ranks of the set in this domain have waited long under the name, each for an operation of its own.
  void stuck(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks);
  void failed(const Status& status);
  /// Tells this domain's log again what the ranks of the others said of a tensor that it has forgotten.
  void retell(const UnitKey& key);
  /// Root: tells all other domains that the set's next batches are cut.
  void announce_cut(int process_set);
  /// Others: tells the root that so many cuts of the set are over in this domain.
  void tell_credit(int process_set, int domain, std::uint64_t over);
  /// Root: whether all ranks have left, and everything they were ready for before is decided.
  [[nodiscard]] bool all_left() const { return left_.size() == actions_.ranks_of(0)->size(); }
  /// Root: tells all other domains so, once what is decided is cut.
  void announce_end();

  /// Sends what has gathered and acts on what has arrived. True if there was anything.
  bool advance();
  [[nodiscard]] bool is_root() const { return transport_.domain() == 0; }
  /// Ranks in those parts of this leader's subtree that are not ready for what another part of it is ready for: some of them hold it up.
  [[nodiscard]] std::vector<int> awaited(const UnitKey& key) const;
  /// Some domain of this leader's subtree is ready for something that is not decided yet.
  /// Tensors that this leader remembers.
  [[nodiscard]] std::size_t tensors_kept() const { return known_.size(); }
  /// Process sets and names of which it remembers more than their tensors.
  [[nodiscard]] std::size_t sets_and_names_kept() const {
    return joined_.size() + join_order_.size() + subtrees_.size() + stuck_said_.size() + stuck_.size();
  }
  [[nodiscard]] bool is_waiting() const { return !counts_.empty() || !held_.empty() || !held_back_.empty(); }

 private:
  using Name = std::pair<int, std::string>;  ///< process set and name
  /// What ranks say of a tensor, all the same.
  struct Introduction {
    std::uint32_t id = 0;  ///< on the way down
    UnitKey key;
    SharedSignature signature;
    Runs ranks;
  };
  /// Introductions that go the same way next, in the order in which each key was first said; of one key no two that follow one another are
  /// equal.
  struct Gathered {
    std::vector<Introduction> list;
    std::map<UnitKey, std::size_t> last;  ///< of each key, in the list
    void add(const Introduction& introduction);
  };
  struct Known {
    UnitKey key;
    std::vector<Introduction> remote;  ///< what ranks of other domains said, for the day this domain forgets it; runs ascending and apart
    std::uint64_t decided_at = 0;      ///< the decision that was the last about it
    std::list<std::uint32_t>::iterator usage = {};  ///< root: its place in `usage_`
  };
  /// Of this domain and the children's subtrees, those that are ready.
  struct Count {
    std::set<int> subtrees;  ///< by their first domain
    Agreement what;
  };

  void introduced(const UnitKey& key, int rank, const SharedSignature& signature);
  void say_held();
  void removed(int process_set);
  void left(int rank, Pledges pledges, int subtree);
  void receive_leaving(Reader& reader, int from);
  void spread_leaving(int rank, int from);
  void doubted(const UnitKey& key);
  void refuse_if_hopeless(const UnitKey& key);
  void refuse(const UnitKey& key, int rank);
  void forget(const UnitKey& key);
  void retire_some();
  void retire(std::vector<std::uint32_t> ids);
  void answer_if_complete();
  void end_retiring(const std::vector<std::uint32_t>& forgotten);
  [[nodiscard]] std::uint64_t last_decision(const Name& name) const;
  void receive(const Message& message);
  void hold_back(Message message);
  void hold_back_leaving(int rank, int from);
  bool take_held_back();
  void act_on(std::size_t& at, const Message& message, bool passed_on);
  bool act_on_item(const Bytes& bytes, const Message& message, bool passed_on);
  void receive_failure(Reader& reader, std::span<const std::byte> item, int from);
  bool pass_on_decisions(const Message& message);
  bool expect_rank(int process_set, int rank);
  bool expect_ranks(int process_set, const Runs& runs);
  void receive_introduction(Reader& reader, bool from_parent);
  std::uint32_t number_of(const UnitKey& key);
  void learn(const Introduction& introduction);
  void count_ready(std::uint32_t id, int subtree, const Agreement& what);
  void pass_on_if_complete(std::uint32_t id);
  void decide(std::uint32_t id, const Agreement& what);
  void decided(std::uint32_t id);
  void note_join(int process_set, int rank);
  void learn_joined(int process_set, int rank);
  [[nodiscard]] int subtree_of(int domain) const;
  const std::set<int>& subtrees_with(int process_set);
  void receive_credit(Reader& reader, const Bytes& item);
  void receive_stuck(Reader& reader, std::span<const std::byte> item);
  void receive_conflict(Reader& reader, std::span<const std::byte> item);
  void send(int domain, const Bytes& item);
  void send_down(const Bytes& item);
  void write(Gathered& gathered, bool up);
  bool flush();

  Transport& transport_;
  LeaderTreeActions actions_;
  int parent_ = -1;
  struct Child {
    int domain, end;  ///< its subtree is [domain, end)
  };
  std::vector<Child> children_;
  std::map<UnitKey, std::uint32_t> ids_;
  std::unordered_map<std::uint32_t, Known> known_;
  std::unordered_map<std::uint32_t, Count> counts_;
  std::vector<LocalEvent> held_;                 ///< Ready before the root's number for it came down; what must not overtake that
  std::map<int, std::set<int>> joined_;          ///< of the subtree, by process set
  std::map<int, std::vector<int>> join_order_;   ///< by process set: ranks that are known to have joined, as that became known
  std::map<int, std::set<int>> subtrees_;        ///< with ranks of a process set
  std::set<int> left_;                           ///< root: ranks that have left
  PledgeTable pledged_;                          ///< root: from the round on that is not decided yet
  std::uint32_t next_id_ = 0;                    ///< above all numbers that were ever given, as far as is known here
  std::uint64_t decided_ = 0;                    ///< decisions so far: the same count everywhere, at the same place in the stream
  std::uint64_t refused_at_ = 0;                 ///< the last of them that refused a tensor
  std::map<Name, std::uint64_t> stuck_said_;     ///< this domain has said so, when this was the last decision about the name
  std::map<Name, std::map<int, OpKind>> stuck_;  ///< root: by rank, for what
  Gathered up_, down_;                           // introductions to be sent before whatever is sent next
  std::map<int, Writer> outgoing_;
  /// Begins with a cut from the parent that this domain has no room for yet; after it what came later from there, and that ranks have left,
  /// which must not overtake what was decided before. That is the flow control of batches:
  /// what is decided comes in one order, so a domain that lags behind takes up no more of it until its batches are over.
  struct HeldBack {
    Message message;
    std::size_t done = 0;    ///< bytes of it that have been acted on
    bool passed_on = false;  ///< the children have all of it already; of ranks that have left: the parent
    bool begun = false;      ///< whether that has been decided
  };
  std::deque<HeldBack> held_back_;
  bool failed_ = false;

  // The root lets go of numbers in two steps. It asks all domains to forget some tensors; each says which of them it still uses; then the
  // root says of which the numbers are given up. A domain that has forgotten one and meets it again in between introduces it again, and
  // does not say that it is ready before it knows whether the number still holds.
  std::size_t capacity_;
  std::list<std::uint32_t> usage_;       ///< root: all numbers, the one longest not decided first
  std::uint64_t retired_at_ = 0;         ///< root: decisions when it asked last
  std::vector<std::uint32_t> retiring_;  ///< what was asked for, until the root says what came of it
  std::size_t answers_missing_ = 0;      ///< children that have not answered
  std::set<std::uint32_t> in_use_;       ///< of `retiring_`, in this subtree
  std::set<UnitKey> unsure_;             ///< forgotten by this domain, and the number may not hold
};

}  // namespace hvd
