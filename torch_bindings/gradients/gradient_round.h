#pragma once
/// One bucket's way through a round of gradients, and how this rank's gradients have come in it.
/// Pure: it knows no tensors and no ranks, and of the bucket's submission its handle alone. Thread:
/// the reducer's, under its lock.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hvd/submission.h"

namespace hvd {

enum class RoundState : std::uint8_t {
  Gathering,  ///< none of its gradients is complete
  Counted,    ///< one is, and it is known how many are awaited
  UnderWay,   ///< submitted: a gradient that comes now is late
  PutAway,    ///< what it gave has gone to who keeps it, where it is not left in `.grad`
};
enum class RoundEvent : std::uint8_t { Count, Submit, PutAway };

/// Gathering -> Counted -> UnderWay -> PutAway. It is submitted uncounted where the optimizer
/// waits, and again where ranks did not know the same of it; what is put away early is put away
/// again at the end. Throws std::logic_error for any other pair: that would be a bug here.
RoundState advance(RoundState state, RoundEvent event);

/// The round of one bucket. Its members are gradients, by their places in the bucket.
class GradientRound {
 public:
  explicit GradientRound(std::size_t members) : members_(members) {}

  [[nodiscard]] RoundState state() const { return state_; }
  [[nodiscard]] bool is_submitted() const { return state_ >= RoundState::UnderWay; }
  /// Returns whether all that are awaited are there, and it is still to be submitted.
  [[nodiscard]] bool is_complete() const { return state_ == RoundState::Counted && missing_ == 0; }
  /// Returns whether it has been reduced, without an error.
  [[nodiscard]] bool is_reduced() const {
    return is_submitted() && pending_->done && pending_->status.ok();
  }
  /// Returns the handle of its submission, or of what has failed in its place; null before.
  [[nodiscard]] const std::shared_ptr<HandleState>& pending() const { return pending_; }

  /// Notes that backward has given the gradient, as often as agreed.
  void give(std::size_t member);
  /// Sets which gradients it is not to be submitted without while backward runs.
  void count(const std::vector<bool>& are_awaited);
  /// Notes whether there is something of a gradient that backward has not given as often as agreed,
  /// or that is not to count as given; else it goes as zeros.
  void find(std::size_t member, bool is_there) {
    members_[member].arrival = is_there ? Arrival::Found : Arrival::Missing;
  }
  /// Notes a gradient that has come when the bucket was under way without it. `counts`: it goes in
  /// a round of its own.
  void come_late(std::size_t member, bool counts) { members_[member].is_late = counts; }
  /// Sets whether what a user has made of the gradient counts, and not what the round gives.
  void keep(std::size_t member, bool is_kept) { members_[member].is_kept = is_kept; }
  void submit(std::shared_ptr<HandleState> pending);
  void put_away() { state_ = advance(state_, RoundEvent::PutAway); }
  /// Begins the next one.
  void forget();

  [[nodiscard]] bool is_given(std::size_t member) const {
    return members_[member].arrival == Arrival::Given;
  }
  /// Returns whether this rank has a gradient.
  [[nodiscard]] bool is_present(std::size_t member) const {
    return members_[member].arrival != Arrival::Missing;
  }
  [[nodiscard]] bool is_awaited(std::size_t member) const { return members_[member].is_awaited; }
  [[nodiscard]] bool is_late(std::size_t member) const { return members_[member].is_late; }
  [[nodiscard]] bool is_kept(std::size_t member) const { return members_[member].is_kept; }
  /// Returns whether the gradient is not to be changed now.
  [[nodiscard]] bool is_under_way(std::size_t member) const;
  [[nodiscard]] bool has_late() const;
  [[nodiscard]] bool has_given() const;

 private:
  enum class Arrival : std::uint8_t { Missing, Found, Given };
  struct Member {
    Arrival arrival = Arrival::Missing;
    bool is_awaited = false;
    bool is_late = false;
    bool is_kept = false;
  };

  RoundState state_ = RoundState::Gathering;
  std::vector<Member> members_;
  std::size_t missing_ = 0;  ///< gradients that are awaited still, once they have been counted
  std::shared_ptr<HandleState> pending_;
};

}  // namespace hvd
