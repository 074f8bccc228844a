#pragma once
/// The messages among the leaders of the domains: which items there are, how they are laid out,
/// made and read. Values and functions without state. Reading throws WireError if an item is
/// malformed in itself; what it means is the LeaderTree's to judge.
///
/// A message is a list of items, one after the other, which are acted on in their order. An item is
/// its length u32, and then so many bytes: one that says which, its LeaderItem, and what follows
/// here, without gaps and in native byte order:
///
///   item           goes   after the byte that says which              it says
///   IntroduceUp    up     key, ranks, signature                       what these ranks send under
///                                                                     the key
///   IntroduceDown  down   id u32, key, ranks, signature               the same, and the key's
///                                                                     number
///   Ready          up     id u32, agreement                           the domains of the subtree
///                                                                     are ready
///   Joined         up     set i32, rank i32                           a rank of the subtree has
///                                                                     joined
///   Agree          down   id u32, agreement                           all domains are ready:
///                                                                     decided
///   Cut            down   set i32                                     the set's next batches are
///                                                                     cut
///   LeaveUp        up     rank i32, reservations                      a rank of the subtree has
///                                                                     left; what it still takes
///                                                                     part in
///   Leave          down   rank i32                                    a rank of another subtree
///                                                                     has left
///   Doubt          up     key                                         can it be complete, although
///                                                                     a rank has left?
///   Refuse         down   key, rank i32, text                         it never will be, because
///                                                                     the rank has left, or as the
///                                                                     text says: decided
///   Retire         down   list of id u32                              forget these, as far as you
///                                                                     do not use them
///   Retired        up     list of id u32                              these are in use in the
///                                                                     subtree
///   Forget         down   list of id u32                              these numbers are given up;
///                                                                     the rest of what was to
///                                                                     retire holds
///   End            down                                               all ranks have left, and all
///                                                                     is decided
///   Fail           any    code u8, text                               the world has failed; any
///                                                                     rank may say so to any
///                                                                     leader
///   Stuck          up     set i32, name, decisions u64, stuck ranks   ranks of a domain wait for
///                                                                     different operations under
///                                                                     the name; the last decision
///                                                                     about the name that it knows
///   Conflict       down   set i32, name, stuck ranks                  these ranks are told that
///                                                                     their operations differ:
///                                                                     decided
///   Credit         up     set i32, domain i32, over u64               so many cuts of the set are
///                                                                     over in the domain
///   Blocked        up     domain i32, blocked ranks, decisions        these ranks of the domain
///                                                                     wait, and submit nothing; it
///                                                                     replaces what the domain has
///                                                                     said before
///   Late           up     key, rank i32, deadline i64, list of i32,   the rank's operation has not
///                                                                     ended so many ns after its
///                                                                     submission;
///                         lists                                       these ranks of the subtree
///                                                                     lack, and some of each of
///                                                                     those
///
/// where list, key, name, ranks, agreement and stuck ranks are as in
/// hvd/negotiation/values/records.h, and
///
///   text            count u32, then the characters
///   lists           count u32, then a list of i32 each
///   reservations    count u32, then (key, rounds u32) each
///   blocked ranks   count u32, then (rank i32, keys that it waits for, keys that it has submitted)
///                   each; keys: count u32, then the keys
///   decisions       count u32, then (key, the last decision under its name that the domain knows
///                   u64) each
// Tested in tests/hvd/negotiation/leader_tree_test.cc, tests/fuzz/leader_tree_fuzz.cc

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/negotiation/leaders/late_report.h"
#include "hvd/negotiation/table/deadlock.h"
#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/signature.h"

namespace hvd {

enum class LeaderItem : std::uint8_t {
  IntroduceUp,
  IntroduceDown,
  Ready,
  Joined,
  Agree,
  Cut,
  LeaveUp,
  Leave,
  Doubt,
  Refuse,
  Retire,
  Retired,
  Forget,
  End,
  Fail,
  Stuck,
  Conflict,
  Credit,
  Blocked,
  Late,
};
static_assert(sizeof(Status::Code) == 1);

/// The direction in which an item goes in the tree.
enum class Way : std::uint8_t { Up, Down, Any };
[[nodiscard]] Way way_of(LeaderItem item);

/// The word of ranks that say the same of a tensor.
struct Introduction {
  std::uint32_t id = 0;  ///< on the way down
  UnitKey key;
  SharedSignature signature;
  Runs ranks;
};

/// The report of a domain whose ranks wait for different operations under one name.
struct StuckReport {
  int process_set = 0;
  std::string name;
  std::uint64_t last_decision = 0;  ///< Stuck alone
  std::vector<StuckRank> ranks;
};

/// Makes items.
struct LeaderItems {
  static Bytes introduce_up(const Introduction& introduction);
  static Bytes introduce_down(const Introduction& introduction);
  static Bytes ready(std::uint32_t id, const Agreement& what);
  static Bytes joined(int process_set, int rank);
  static Bytes agree(std::uint32_t id, const Agreement& what);
  static Bytes cut(int process_set);
  static Bytes leave_up(int rank, const Pledges& pledges);
  static Bytes leave(int rank);
  static Bytes doubt(const UnitKey& key);
  static Bytes refuse(const UnitKey& key, int rank, std::string_view text);
  static Bytes retire(const std::vector<std::uint32_t>& ids);
  static Bytes retired(const std::vector<std::uint32_t>& in_use);
  static Bytes forget(const std::vector<std::uint32_t>& ids);
  static Bytes end();
  static Bytes fail(const Status& status);
  static Bytes stuck(const StuckReport& report);
  static Bytes conflict(const StuckReport& report);
  static Bytes credit(int process_set, int domain, std::uint64_t over);
  static Bytes blocked(const BlockedReport& report);
  static Bytes late(const LateReport& report);
  /// Returns a message of one item.
  static Bytes message_of(const Bytes& item);
};

// ---- reading; all throw WireError on malformed input
/// Reads which item it is. The functions below read what follows, where that is more than a number
/// or two.
LeaderItem decode_item(Reader& reader);
/// Reads an IntroduceUp, or with its number an IntroduceDown.
Introduction decode_introduced(Reader& reader, bool with_number);
Pledges decode_pledges(Reader& reader);
Status decode_failure(Reader& reader);
StuckReport decode_stuck(Reader& reader);
StuckReport decode_conflict(Reader& reader);

}  // namespace hvd
