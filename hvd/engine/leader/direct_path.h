#pragma once
/// DirectPath is a leader's part in repeated small operations of all ranks of several domains
/// (hvd/engine/fast_path/fast_path.h): once its ranks have arrived it sends the other leaders their
/// contribution, and once it has the others' it does the operation in its ranks' blocks. Owns the
/// rounds among the leaders (hvd/negotiation/leaders/direct_rounds.h). Of a rank that leads its
/// domain; the thread that has the turn drives it, under the engine's mutex.

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"
#include "hvd/engine/fast_path/fast_path.h"
#include "hvd/negotiation/board/negotiation_log.h"
#include "hvd/negotiation/leaders/direct_rounds.h"
#include "hvd/negotiation/leaders/leader_tree.h"

namespace hvd {

/// The leader tree's transport. Sets messages aside that are not the tree's.
class DirectLane final : public Transport {
 public:
  explicit DirectLane(Transport& wire) : wire_(wire) {}
  [[nodiscard]] int domain() const override { return wire_.domain(); }
  [[nodiscard]] int domains() const override { return wire_.domains(); }
  void send(int to, SharedBytes message) override { wire_.send(to, std::move(message)); }
  std::optional<Message> receive() override;
  /// Looks for messages once. Returns whether there was one.
  bool look();
  /// A message of a round among leaders.
  struct Direct {
    int from = 0;
    DirectRounds::Part message;
  };
  /// Returns the next of them that has been seen.
  std::optional<Direct> take_direct() { return take(direct_); }
  /// Returns whether one of the tree's has been seen.
  [[nodiscard]] bool has_others() const { return !others_.empty(); }

 private:
  template <class T>
  static std::optional<T> take(std::deque<T>& messages) {
    if (messages.empty()) return std::nullopt;
    T message = std::move(messages.front());
    messages.pop_front();
    return message;
  }
  Transport& wire_;
  std::deque<Direct> direct_;
  std::deque<Message> others_;
};

class DirectPath {
 public:
  DirectPath(const EngineParts& parts, NegotiationLog& log, FastPath& fast_path, Transport& wire);

  /// The transport for the leader tree, which this looks at too.
  [[nodiscard]] Transport& lane() { return lane_; }
  /// Adds the tree's calls to this.
  void add_actions(LeaderTreeActions& actions);
  /// Does what can be done now. Returns whether there was anything.
  bool drive(LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  /// The same, of what arrives meanwhile, and leaves other messages for later.
  bool look(LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_others() const { return lane_.has_others(); }
  /// Returns whether others are awaited.
  [[nodiscard]] bool is_waiting() const { return rounds_.has_promised(); }
  /// Returns the domains that keep the round waiting, if this one has contributed to it.
  [[nodiscard]] std::vector<int> missing(std::uint32_t number) const {
    return rounds_.missing(number);
  }
  [[nodiscard]] std::size_t numbers_kept() const { return rounds_.numbers_kept(); }

 private:
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  bool act_on_messages(LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool is_to_begin(const RepeatedOp& op) const HVD_REQUIRES(engine_mutex);
  bool promise_rounds(LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool is_being_removed(int process_set) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_any_to_begin() const HVD_REQUIRES(engine_mutex);
  void judge(LeaderTree& tree) HVD_REQUIRES(engine_mutex, board_lock);
  [[nodiscard]] bool may_promise(RepeatedOp& op, const LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  void contribute(RepeatedOp& op, std::size_t left) HVD_REQUIRES(engine_mutex);
  bool end_rounds(LeaderTree& tree) HVD_REQUIRES(engine_mutex);
  void fall_back(std::uint32_t number, const UnitKey& key) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] RepeatedOp* find(std::uint32_t number, const UnitKey& key)
      HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  FastPath& fast_path_;
  Board& board_;
  const std::uint64_t domains_elsewhere_;  ///< on other hosts
  DirectLane lane_;
  DirectRounds rounds_;
  std::vector<RepeatedOp*> promised_;  ///< of `promise_rounds`: what this domain contributes to
  std::vector<UnitRef> slow_;          ///< likewise: those that are to be negotiated
  std::vector<RepeatedOp*>
      ended_;  ///< of `end_rounds`, in the order of the rounds; null where there is none any more
  std::size_t found_at_ = 0;  ///< where `find` goes on
};

}  // namespace hvd
