#include "torch_bindings/gradients/gradient_round.h"

#include <algorithm>
#include <stdexcept>

#include "hvd/base/text.h"

namespace hvd {

RoundState advance(RoundState state, RoundEvent event) {
  using S = RoundState;
  using E = RoundEvent;
  if (state == S::Gathering && event == E::Count) return S::Counted;
  if (state != S::PutAway && event == E::Submit) return S::UnderWay;
  if ((state == S::UnderWay || state == S::PutAway) && event == E::PutAway) return S::PutAway;
  throw std::logic_error(formatted("round: no event {} in state {}", static_cast<int>(event),
                                   static_cast<int>(state)));
}

void GradientRound::give(std::size_t member) {
  Member& given = members_[member];
  if (std::exchange(given.arrival, Arrival::Given) != Arrival::Given &&
      state_ == RoundState::Counted && given.is_awaited)
    --missing_;
}

void GradientRound::count(const std::vector<bool>& are_awaited) {
  state_ = advance(state_, RoundEvent::Count);
  missing_ = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    members_[i].is_awaited = are_awaited[i];
    if (are_awaited[i] && !is_given(i)) ++missing_;
  }
}

void GradientRound::submit(std::shared_ptr<HandleState> pending) {
  state_ = advance(state_, RoundEvent::Submit);
  pending_ = std::move(pending);
}

void GradientRound::forget() {
  state_ = RoundState::Gathering;
  members_.assign(members_.size(), Member{});
  pending_.reset();
}

bool GradientRound::is_under_way(std::size_t member) const {
  return !is_late(member) && (is_given(member) || (is_present(member) && is_submitted()));
}

bool GradientRound::has_late() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.is_late; });
}

bool GradientRound::has_given() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.arrival == Arrival::Given; });
}

}  // namespace hvd
