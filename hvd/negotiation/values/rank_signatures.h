#pragma once
/// The words of a process set's ranks about one tensor. Equal signatures are stored once, and ranks that follow one another and say the
/// same are stored as one run: what 1,024 ranks say alike of a tensor takes the memory of one rank's word. A value without a lock; places
/// are ranks within the set, from 0 on.

#include <cstddef>
#include <vector>

#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/signature.h"

namespace hvd {

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
