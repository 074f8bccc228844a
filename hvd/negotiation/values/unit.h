#pragma once
/// A unit: what the table knows of one tensor, or of a group of tensors that become ready together,
/// found by its key; and the slots of the board that units take. Values without a lock and
/// functions of them; the negotiator's are the engine mutex's.
// Tested in tests/hvd/negotiation/negotiator_test.cc, tests/hvd/engine/controller_test.cc

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "hvd/backend.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/process_sets.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// One life of a unit: an id is given out again once the unit is evicted, with the next generation.
struct UnitRef {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  auto operator<=>(const UnitRef&) const = default;
};

struct Unit {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  UnitKey key;
  Scope scope = Scope::Domain;
  std::uint32_t slots = 1;    ///< consecutive slots from `id`, one per tensor
  RankSignatures signatures;  ///< of those ranks of the set that have introduced it
  bool settled = false;       ///< just these have been found to agree: not to be looked at again
  std::list<std::uint32_t>::iterator usage;  ///< place in the least-recently-used list
  bool undecided = false;                    ///< ready in this domain, or agreed, and not yet cut
  bool queued = false;                       ///< agreed and not yet cut
  std::uint64_t cut_at = 0;                  ///< the log's position when it was last cut

  [[nodiscard]] UnitRef ref() const { return {id, generation}; }
};

/// Returns ok if what the ranks of the set have said of the unit agrees, and it can be done without
/// those of `absent` (global ranks, ascending), which have joined; otherwise what is wrong, naming
/// tensor and ranks.
Status judge(const Unit& unit, const ProcessSetInfo& set, const std::vector<int>& absent);
/// Returns for each tensor of the unit the bytes that count against the fusion threshold. `first`:
/// what the first rank that takes part said.
std::vector<std::int64_t> total_bytes(const Unit& unit, const Signature& first);

/// The ranges of the board's slots that are free. A unit takes as many as it has tensors, one after
/// the other. A value without a lock, the same on all ranks that have read the same records.
class SlotRanges {
 public:
  /// All of `count` slots are free.
  explicit SlotRanges(std::uint32_t count);

  /// Returns the first of so many adjacent free slots; none if there are not so many.
  [[nodiscard]] std::optional<std::uint32_t> find(std::uint32_t count) const;
  /// Takes so many from `first` on, which must be where a free range begins. Throws WireError if it
  /// is not so.
  void take(std::uint32_t first, std::uint32_t count);
  /// Gives back what was taken.
  void give_back(std::uint32_t first, std::uint32_t count);

 private:
  std::map<std::uint32_t, std::uint32_t> free_;  // first slot -> length; no two touch
};

}  // namespace hvd
