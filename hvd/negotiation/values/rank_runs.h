#pragma once
/// Lists of ranks, written as runs, and the words of ranks, stored by runs: what all ranks of a
/// large world say alike then takes as much memory, and as many bytes on the wire, as what one
/// says. Plain values and functions without state.
// Tested in tests/hvd/negotiation/rank_signatures_test.cc

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// Ranks, or places in a process set, that follow one another.
struct Run {
  int first = 0;
  int count = 0;
  bool operator==(const Run&) const = default;
};
/// Ascending; no two touch.
using Runs = std::vector<Run>;

/// Adds the ranks of `run`, whether they are in the list or not.
void add(Runs& runs, Run run);
/// Takes the ranks of `run` out, as far as they are in the list.
void remove(Runs& runs, Run run);
/// Returns the places of the run's ranks in a list of ranks that ascends; none if one of them is
/// not in it.
std::optional<Run> find_run(std::span<const int> ascending, Run run);

/// The words of a process set's ranks about one tensor. Equal signatures are stored once, and ranks
/// that follow one another and say the same are stored as one run: what 1,024 ranks say alike of a
/// tensor takes the memory of one rank's word. A value without a lock; places are ranks within the
/// set, from 0 on.
class RankSignatures {
 public:
  struct Said {
    Run places;
    SharedSignature signature;
  };

  /// Records that the ranks at `places` have said this last.
  void set(Run places, SharedSignature signature);
  /// Returns what the rank at `place` has said last, or null if it has said nothing.
  [[nodiscard]] const SharedSignature& of(std::size_t place) const;
  /// Returns how many ranks have said something.
  [[nodiscard]] std::size_t count() const;
  /// Returns whether all of `places` have said just this, which is one of the values stored here.
  [[nodiscard]] bool all_say(Run places, const SharedSignature& signature) const;
  /// Returns whether all of `places` have said what equals this.
  [[nodiscard]] bool all_equal(Run places, const Signature& signature) const;
  /// Returns what was said, by ascending places; neighbours that say the same are one.
  [[nodiscard]] const std::vector<Said>& said() const { return said_; }

 private:
  [[nodiscard]] std::vector<Said>::const_iterator find(int place) const;
  std::vector<Said> said_;
};

}  // namespace hvd
