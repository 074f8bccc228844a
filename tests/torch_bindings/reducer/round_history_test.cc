// What tells a rank's rounds apart, and what it says of them.
#include "torch_bindings/reducer/round_history.h"

#include <doctest/doctest.h>

#include <set>

namespace round_history_test {
namespace {

using hvd::RoundHistory;
using hvd::Shape;

TEST_CASE(
    "round history: rounds between two steps are told apart, up to eight, and so is whether there "
    "was a step before them") {
  RoundHistory history("optimizer.0");
  CHECK((history.kind() == 0 && history.peculiarities(false).empty()));
  std::set<std::size_t> kinds;
  for (int times = 0; times < 2; ++times) {
    for (int round = 0; round < 12; ++round) {
      kinds.insert(history.kind());
      history.end_round();
    }
    history.throw_away();
  }
  CHECK(kinds.size() == 18);
  history.throw_away();  // nothing came meanwhile
  CHECK(history.kind() == 9);
  history.begin_step();
  CHECK(history.kind() == 0);
  history.throw_away();  // no round, no trace
  CHECK(history.kind() == 0);
  history.end_round();
  history.undo_round();
  CHECK(history.kind() == 0);
  history.end_round();
  history.begin_anew();
  CHECK(history.kind() == 0);
  history.fail(true);
  CHECK(!kinds.contains(history.kind()));
  CHECK(history.peculiarities(false) == "has left a backward pass by an exception");
}

TEST_CASE(
    "round history: what was announced is compared once, unless something else has been announced "
    "meanwhile") {
  RoundHistory history("optimizer.0");
  CHECK(history.announced().empty());
  history.announce({3, 4}, "");
  CHECK(history.words() == "how many parameters each group of optimizer.0 has");
  history.submit_announcement();
  CHECK(history.announced() == Shape{3, 4});
  history.end_announcement();
  CHECK(history.announced().empty());
  history.end_announcement();

  history.announce({5}, "has a new head");
  CHECK(history.words() == "a digest of what optimizer.0 has");
  history.end_announcement();  // of a round that has not carried it
  CHECK(history.announced() == Shape{5});
  history.submit_announcement();
  history.announce({6}, "has two");
  history.end_announcement();
  CHECK(history.announced() == Shape{6});
  history.drop_announcement();
  CHECK(history.announced().empty());
}

TEST_CASE("round history: what is unusual is said, all of it") {
  RoundHistory history("ddp.1");
  CHECK(history.peculiarities(true) == "has called set_weight() for this step");
  history.end_round();
  CHECK(history.peculiarities(false) ==
        "has reduced gradients since its last step() or zero_grad()");
  history.throw_away();
  CHECK(history.peculiarities(false) == "has thrown its last gradients away without a step()");
  history.refuse("head.weight");
  CHECK(history.peculiarities(true) ==
        "has called set_weight() for this step, and has not made its last step, as the gradient of "
        "'head.weight' was changed while on its way");
  history.end_round();
  history.announce({1}, "");
  CHECK(history.peculiarities(false).starts_with(
      "has changed the parameters or groups of ddp.1, and "));
  history.announce({1}, "has unfrozen 2 parameters");
  CHECK(history.peculiarities(false).starts_with("has unfrozen 2 parameters, and "));
  history.drop_announcement();
  history.begin_step();
  CHECK(history.peculiarities(false).empty());
}

}  // namespace
}  // namespace round_history_test
