#pragma once
/// The messages among the leaders of the domains: which items there are, how they are laid out,
/// made and read. Values and functions without state. Reading throws WireError if an item is
/// malformed in itself; what it means is the LeaderTree's to judge.
///
/// A message is a list of items, one after the other, which are acted on in their order. An item is
/// its length u32, and then so many bytes: one that says which, its LeaderItem, and what stands
/// there, without gaps and in native byte order, where lists and texts are as in
/// hvd/negotiation/values/records.h, and ids are the numbers of keys.
// Tested in tests/hvd/negotiation/leader_tree_test.cc, tests/fuzz/leader_tree_fuzz.cc

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/negotiation/leaders/late_report.h"
#include "hvd/negotiation/table/deadlock.h"
#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/status_wire.h"

namespace hvd {

/// A LeaderItem says which item it is: the way that it goes, what it says, and what follows.
enum class LeaderItem : std::uint8_t {
  IntroduceUp,    ///< Up. What these ranks send under the key: key, list of Run, signature
  IntroduceDown,  ///< Down. The same, and the key's number: id u32, key, list of Run, signature
  Ready,          ///< Up. The domains of the subtree are ready: id u32, Agreement
  Joined,         ///< Up. A rank of the subtree has joined: set i32, rank i32
  Agree,          ///< Down. All domains are ready, which decides it: id u32, Agreement
  Cut,            ///< Down. The set's next batches are cut: set i32
  LeaveUp,        ///< Up. A rank of the subtree has left, with what it still takes part in: rank
                  ///< i32, count u32, (key, rounds u32) each
  Leave,          ///< Down. A rank of another subtree has left: rank i32
  Doubt,          ///< Up. Can it be complete, although a rank has left: key
  Refuse,         ///< Down. It never will be, because the rank has left, or as the text says, which
                  ///< decides it: key, rank i32, text
  Retire,         ///< Down. Forget these, as far as you do not use them: list of id u32
  Retired,        ///< Up. These are in use in the subtree: list of id u32
  Forget,    ///< Down. These are given up; the rest of what was to retire holds: list of id u32
  End,       ///< Down. All ranks have left, and all is decided: nothing
  Fail,      ///< Any. The world has failed; any rank may say so to any leader: Status
  Stuck,     ///< Up. Ranks of a domain wait for different operations under the name: StuckReport
  Conflict,  ///< Down. These ranks are told that their operations differ, which decides it: the
             ///< same without `last_decision`
  Credit,    ///< Up. So many cuts of the set are over in the domain: set i32, domain i32, over u64
  Blocked,   ///< Up. Ranks of the domain wait, and submit nothing; it replaces what the domain
             ///< has said before: BlockedReport
  Late,      ///< Up. The rank's operation has not ended by its deadline: LateReport
  Linger,    ///< Up. One rank more (1), or less (-1), has sends or recvs pending as it leaves:
             ///< change i32
};

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

void encode(Writer& writer, const Pledges& pledges);

/// Makes items.
struct LeaderItems {
  using Id = std::uint32_t;
  static Bytes introduce_up(const Introduction& said) {
    return to_wire(LeaderItem::IntroduceUp, said.key, said.ranks, *said.signature);
  }
  static Bytes introduce_down(const Introduction& said) {
    return to_wire(LeaderItem::IntroduceDown, said.id, said.key, said.ranks, *said.signature);
  }
  static Bytes ready(Id id, const Agreement& what) { return to_wire(LeaderItem::Ready, id, what); }
  static Bytes joined(int process_set, int rank) {
    return to_wire(LeaderItem::Joined, process_set, rank);
  }
  static Bytes agree(Id id, const Agreement& what) { return to_wire(LeaderItem::Agree, id, what); }
  static Bytes cut(int process_set) { return to_wire(LeaderItem::Cut, process_set); }
  static Bytes leave_up(int rank, const Pledges& pledges) {
    return to_wire(LeaderItem::LeaveUp, rank, pledges);
  }
  static Bytes lingering(int change) { return to_wire(LeaderItem::Linger, change); }
  static Bytes leave(int rank) { return to_wire(LeaderItem::Leave, rank); }
  static Bytes doubt(const UnitKey& key) { return to_wire(LeaderItem::Doubt, key); }
  static Bytes refuse(const UnitKey& key, int rank, std::string_view text) {
    return to_wire(LeaderItem::Refuse, key, rank, text);
  }
  static Bytes retire(const std::vector<Id>& ids) { return to_wire(LeaderItem::Retire, ids); }
  static Bytes retired(const std::vector<Id>& ids) { return to_wire(LeaderItem::Retired, ids); }
  static Bytes forget(const std::vector<Id>& ids) { return to_wire(LeaderItem::Forget, ids); }
  static Bytes end() { return to_wire(LeaderItem::End); }
  static Bytes fail(const Status& status) { return to_wire(LeaderItem::Fail, status); }
  static Bytes stuck(const StuckReport& said) {
    return to_wire(LeaderItem::Stuck, said.process_set, said.name, said.last_decision, said.ranks);
  }
  static Bytes conflict(const StuckReport& said) {
    return to_wire(LeaderItem::Conflict, said.process_set, said.name, said.ranks);
  }
  static Bytes credit(int process_set, int domain, std::uint64_t over) {
    return to_wire(LeaderItem::Credit, process_set, domain, over);
  }
  static Bytes blocked(const BlockedReport& said) { return to_wire(LeaderItem::Blocked, said); }
  static Bytes late(const LateReport& said) { return to_wire(LeaderItem::Late, said); }
  /// Returns a message of one item.
  static Bytes message_of(const Bytes& item) { return Writer().put_bytes(item).take(); }
};

// ---- reading; all throw WireError on malformed input
/// Reads which item it is. The functions below read what follows, where that is more than a number
/// or two.
LeaderItem decode_item(Reader& reader);
/// Reads an IntroduceUp, or with its number an IntroduceDown.
Introduction decode_introduced(Reader& reader, bool with_number);
Pledges decode_pledges(Reader& reader);
StuckReport decode_stuck(Reader& reader);
StuckReport decode_conflict(Reader& reader);

}  // namespace hvd
