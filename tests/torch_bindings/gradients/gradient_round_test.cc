// One bucket's way through a round: which events are possible when, and what each gradient of this
// rank counts as.
#include "torch_bindings/gradients/gradient_round.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>

#include "hvd/errors.h"

namespace gradient_round_test {
namespace {

using hvd::GradientRound;
using hvd::HandleState;
using State = hvd::RoundState;
using Event = hvd::RoundEvent;

TEST_CASE("gradient round: of all pairs of state and event, six go on") {
  constexpr std::array kStates{State::Gathering, State::Counted, State::UnderWay, State::PutAway};
  constexpr std::array kEvents{Event::Count, Event::Submit, Event::PutAway};
  const auto next = [](State state, Event event) -> std::optional<State> {
    if (event == Event::Count && state == State::Gathering) return State::Counted;
    if (event == Event::Submit && state != State::PutAway) return State::UnderWay;
    if (event == Event::PutAway && state >= State::UnderWay) return State::PutAway;
    return std::nullopt;
  };
  int possible = 0;
  for (const auto state : kStates) {
    for (const auto event : kEvents) {
      if (const auto then = next(state, event)) {
        CHECK(hvd::advance(state, event) == *then);
        ++possible;
      } else {
        CHECK_THROWS_AS(hvd::advance(state, event), std::logic_error);
      }
    }
  }
  CHECK(possible == 6);
}

TEST_CASE("gradient round: it is complete with the last gradient that is awaited") {
  GradientRound round(4);
  CHECK((round.state() == State::Gathering && !round.has_given()));
  round.give(1);
  CHECK(!round.is_complete());  // nobody has counted
  round.count({true, true, false, true});
  CHECK((round.is_awaited(0) && !round.is_awaited(2)));
  round.give(1);  // once more
  round.give(2);  // nobody waits for it
  round.give(0);
  CHECK(!round.is_complete());
  round.give(3);
  CHECK(round.is_complete());
  round.submit(std::make_shared<HandleState>());
  CHECK((!round.is_complete() && round.is_submitted()));

  GradientRound by_one(2);
  by_one.give(0);
  by_one.count({true, false});
  CHECK(by_one.is_complete());
}

TEST_CASE(
    "gradient round: what is under way is what backward gave, and what was found when the bucket "
    "left, unless it came too late") {
  GradientRound round(4);
  round.give(0);
  round.find(1, true);
  round.find(2, false);
  round.find(3, true);
  CHECK((round.is_under_way(0) && !round.is_under_way(1)));
  CHECK((round.is_present(0) && round.is_present(1) && !round.is_present(2)));
  CHECK((round.is_given(0) && !round.is_given(1)));
  round.submit(std::make_shared<HandleState>());
  round.come_late(2, true);
  round.come_late(3, true);
  CHECK((round.is_under_way(0) && round.is_under_way(1) && !round.is_under_way(2) &&
         !round.is_under_way(3)));
  CHECK((round.is_late(3) && round.is_present(3) && !round.is_present(2) && round.has_late()));
  // sparse: it has not left
  for (const std::size_t member : {2, 3}) round.come_late(member, false);
  CHECK((!round.has_late() && round.is_under_way(3)));
}

TEST_CASE(
    "gradient round: it is reduced when its submission is over without an error, and submitted "
    "again where ranks differed") {
  GradientRound round(1);
  CHECK((!round.is_reduced() && round.pending() == nullptr));
  const auto refused = std::make_shared<HandleState>(), reduced = std::make_shared<HandleState>();
  round.submit(refused);
  CHECK(!round.is_reduced());
  refused->status = hvd::Status(hvd::Status::Code::Mismatch, "shapes differ");
  refused->done = true;
  CHECK(!round.is_reduced());
  round.submit(reduced);
  CHECK((round.pending() == reduced && !round.is_reduced()));
  reduced->done = true;
  CHECK(round.is_reduced());
  round.put_away();
  round.put_away();
  CHECK((round.state() == State::PutAway && round.is_submitted()));
  CHECK_THROWS_AS(round.submit(refused), std::logic_error);
}

TEST_CASE("gradient round: nothing is left of it in the next one") {
  GradientRound round(2);
  round.give(0);
  round.count({true, true});
  round.find(1, true);
  round.submit(std::make_shared<HandleState>());
  round.come_late(1, true);
  round.keep(0, true);
  CHECK(round.is_kept(0));
  round.put_away();
  round.forget();
  CHECK((round.state() == State::Gathering && round.pending() == nullptr && !round.has_late() &&
         !round.has_given()));
  for (const std::size_t member : {0, 1})
    CHECK((!round.is_present(member) && !round.is_awaited(member) && !round.is_kept(member) &&
           !round.is_under_way(member)));
  round.give(1);
  round.count({true, true});
  CHECK(!round.is_complete());
}

}  // namespace
}  // namespace gradient_round_test
