#pragma once
/// Pledges are the reservations of ranks that have left. A rank that calls shutdown() submits
/// nothing more, but what it has submitted before may still wait for the others, or for an earlier
/// submission of the same name: it reserves so many rounds of each. A tensor whose next round such
/// a rank neither has arrived in nor has reserved can never be complete. Values without a lock: the
/// negotiator's are the engine mutex's, the leader tree's are the driver's.
// Tested in tests/hvd/engine/leavers_test.cc

#include <cstdint>
#include <map>
#include <string>

#include "hvd/types.h"

namespace hvd {

/// The key by which a submission is found: the same name may be in flight for different operations
/// and process sets.
struct UnitKey {
  int process_set = 0;
  OpKind kind = OpKind::Allreduce;
  std::string name;
  auto operator<=>(const UnitKey&) const = default;
};

/// Rounds of a unit that a rank still takes part in, as its own domain counts them in its log: by
/// the unit's id there.
struct Pledge {
  std::uint32_t id = 0;
  std::uint32_t rounds = 0;
};
/// The same, where ids mean nothing: between domains.
using Pledges = std::map<UnitKey, std::uint32_t>;

/// The reservations of all ranks that have left.
class PledgeTable {
 public:
  void add(const UnitKey& key, int rank, std::uint32_t rounds);
  [[nodiscard]] bool contains(const UnitKey& key, int rank) const;
  /// Takes one round off what every rank has reserved of the unit: it has been decided.
  void consume(const UnitKey& key);
  void forget(const UnitKey& key) { rounds_.erase(key); }
  void forget_set(int process_set);

 private:
  std::map<UnitKey, std::map<int, std::uint32_t>> rounds_;  // by rank
};

}  // namespace hvd
