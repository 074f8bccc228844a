#pragma once
/// The numbers by which the leaders name tensors to each other, and what each leader remembers of a
/// tensor that has one. The root gives a number with the first introduction; the others learn it on
/// the way down. Also counts the decisions, which come in one order: the same count everywhere, at
/// the same place in the stream.
///
/// What is remembered stays bounded: the root lets go of numbers in two steps. It asks all domains
/// to forget those tensors that were not decided for longest; each says which of them it still
/// uses; then the root says of which the numbers are given up.
///
///   root:   to_retire -> begin_retiring            -> answer... -> given_up -> (Forget) ->
///                                                  end_retiring
///   others:              begin_retiring (Retire)   -> answer... -> in_use   -> (Forget) ->
///                                                                           end_retiring
///
/// A domain that has forgotten one and meets it again in between introduces it again, and does not
/// say that it is ready before it knows whether the number still holds (`is_unsure`). A number that
/// was given up is never given again. A value without a lock, of the thread that drives the leader.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/negotiation/leaders/leader_messages.h"

namespace hvd {

class TensorNumbers {
 public:
  using Names = std::set<std::pair<int, std::string>>;  ///< process set and name

  /// `capacity`: how many tensors are remembered that nobody waits for; beyond it those go that
  /// were not decided for longest.
  TensorNumbers(bool is_root, std::size_t capacity) : is_root_(is_root), capacity_(capacity) {}

  [[nodiscard]] std::optional<std::uint32_t> find(const UnitKey& key) const;
  /// Returns the tensor with this number; null if there is none now. Valid until it is forgotten.
  [[nodiscard]] const UnitKey* key_of(std::uint32_t id) const;
  /// Returns whether the number has been given, as far as is known here.
  [[nodiscard]] bool was_given(std::uint32_t id) const { return id < next_id_; }
  [[nodiscard]] std::size_t count() const { return known_.size(); }
  /// Returns the tensors of a process set.
  [[nodiscard]] std::vector<UnitKey> keys_of_set(int process_set) const;
  /// Names under which a process set has tensors of several kinds.
  [[nodiscard]] const Names& ambiguous_names() const { return ambiguous_; }
  /// Returns what ranks of other domains have said of the tensor, for the day this domain has
  /// forgotten it; null if it has no number. Valid until it is forgotten.
  [[nodiscard]] const std::vector<Introduction>* said_elsewhere(const UnitKey& key) const;

  /// Root: returns the tensor's number; gives it one where it has none.
  std::uint32_t give(const UnitKey& key);
  /// Others: the root has given this number.
  void note_given(std::uint32_t id) { next_id_ = std::max(next_id_, id + 1); }
  /// Records what ranks of other domains say. Throws WireError if the tensor has another number, or
  /// the number another tensor.
  void learn(const Introduction& introduction);
  void forget(const UnitKey& key);

  // ---- decisions
  /// The tensor was decided, if it is still known.
  void decided(std::uint32_t id);
  /// The tensor is in use, without decisions: it is not among those undecided for longest.
  void note_use(std::uint32_t id);
  /// A tensor was refused.
  void refused() { refused_at_ = ++decisions_; }
  /// The tensors, as far as they are known, were found to be in conflict: one decision.
  void in_conflict(const std::vector<UnitKey>& keys);
  /// Returns the last decision about what has the name, the refusals of any name among them.
  [[nodiscard]] std::uint64_t last_decision(int process_set, const std::string& name) const;

  // ---- letting go of numbers
  /// Root: returns the numbers to ask about now, if there are more than are to be remembered; none
  /// while others are asked about. Only so often as there are decisions, so that tensors that are
  /// all in use are not asked about without end. `is_waited_for` ones stay.
  [[nodiscard]] std::vector<std::uint32_t> to_retire(
      const std::function<bool(std::uint32_t)>& is_waited_for);
  [[nodiscard]] bool is_retiring() const { return !retiring_.empty(); }
  /// `children`: the neighbours that are to answer. `drop` forgets the tensor in this domain's
  /// table unless it is in use there: then it returns false.
  void begin_retiring(std::vector<std::uint32_t> ids, std::size_t children,
                      const std::function<bool(const UnitKey&)>& drop);
  /// A child has answered. Throws WireError if it was not asked.
  void answer(const std::vector<std::uint32_t>& in_use);
  [[nodiscard]] bool have_all_answered() const { return answers_missing_ == 0; }
  /// Returns those numbers that this subtree uses, ascending.
  [[nodiscard]] std::vector<std::uint32_t> in_use() const {
    return {in_use_.begin(), in_use_.end()};
  }
  /// Root: returns those that no domain uses.
  [[nodiscard]] std::vector<std::uint32_t> given_up();
  /// Ends that: what was given up has been forgotten, all other numbers hold.
  void end_retiring();
  /// Returns whether this domain has forgotten the tensor, and does not know whether the number
  /// still holds.
  [[nodiscard]] bool is_unsure(const UnitKey& key) const { return unsure_.contains(key); }

 private:
  struct Known {
    UnitKey key;
    std::vector<Introduction> remote;  ///< said by other domains' ranks; runs ascending and apart
    std::uint64_t decided_at = 0;      ///< the decision that was the last about it
    std::list<std::uint32_t>::iterator usage = {};  ///< root: its place in `usage_`
  };
  void count_kinds(const UnitKey& key);
  void use(const Known& known) { usage_.splice(usage_.end(), usage_, known.usage); }

  const bool is_root_;
  const std::size_t capacity_;
  std::map<UnitKey, std::uint32_t> ids_;
  Names ambiguous_;
  std::unordered_map<std::uint32_t, Known> known_;
  std::uint32_t next_id_ = 0;  ///< above all numbers that were ever given, as far as is known here
  std::uint64_t decisions_ = 0;
  std::uint64_t refused_at_ = 0;         ///< the last of them that refused a tensor
  std::list<std::uint32_t> usage_;       ///< root: all numbers, the one longest not decided first
  std::uint64_t retired_at_ = 0;         ///< root: decisions when it asked last
  std::vector<std::uint32_t> retiring_;  ///< asked for, until the root says what came of it
  std::size_t answers_missing_ = 0;      ///< children that have not answered
  std::set<std::uint32_t> in_use_;       ///< of `retiring_`, in this subtree
  std::set<UnitKey> unsure_;
};

}  // namespace hvd
