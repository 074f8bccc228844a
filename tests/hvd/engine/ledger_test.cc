/// The states of an entry, and what may follow what.
#include <doctest/doctest.h>

#include <map>
#include <stdexcept>
#include <utility>

#include "hvd/engine/core/ledger.h"

namespace hvd::test {

TEST_CASE("every pair of state and event") {
  using S = EntryState;
  using E = EntryEvent;
  const std::map<std::pair<S, E>, S> allowed{
      {{S::Waiting, E::Agree}, S::Agreed}, {{S::Agreed, E::Launch}, S::InFlight},
      {{S::InFlight, E::Finish}, S::Done}, {{S::Agreed, E::Finish}, S::Done},
      {{S::Waiting, E::Fail}, S::Failed},  {{S::Agreed, E::Fail}, S::Failed},
      {{S::InFlight, E::Fail}, S::Failed}};
  for (const auto state : {S::Waiting, S::Agreed, S::InFlight, S::Done, S::Failed})
    for (const auto event : {E::Agree, E::Launch, E::Finish, E::Fail}) {
      const auto next = allowed.find({state, event});
      if (next == allowed.end()) {
        CHECK_THROWS_AS(advance(state, event), std::logic_error);
      } else {
        CHECK(advance(state, event) == next->second);
      }
    }
}

}  // namespace hvd::test
