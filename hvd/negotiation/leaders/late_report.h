#pragma once
/// A LateReport is what the leaders tell each other of an operation that has not ended by its
/// deadline: who lacks, as it goes up the tree. The root ends the world with it. Values and pure
/// functions; any thread.
// Tested in tests/hvd/negotiation/leader_tree_test.cc

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/pledges.h"

namespace hvd {

struct LateReport {
  UnitKey key;
  int rank = 0;                           ///< that has submitted it with the deadline
  std::chrono::nanoseconds deadline{0};   ///< from its submission on
  std::vector<int> missing;               ///< ranks that have not submitted it
  std::vector<std::vector<int>> some_of;  ///< of each of these lists some have not

  [[nodiscard]] bool names_somebody() const { return !missing.empty() || !some_of.empty(); }
};
/// Writes its fields in order: the deadline as i64 nanoseconds, lists with their count u32 first.
void encode(Writer& writer, const LateReport& report);
/// Throws WireError on malformed input.
LateReport decode_late_report(Reader& reader);

/// Returns "allreduce 'x' of rank 2 has not ended by its deadline of 5 s: ", with `members` after
/// the name.
std::string late_text(const UnitKey& key, int rank, std::chrono::nanoseconds deadline,
                      std::string_view members = {});
/// Returns the failure that ends the world.
Status late_status(LateReport report);

}  // namespace hvd
