#pragma once
/// The records of a domain's log: what each is for, how it is laid out, how it is made and read.
/// Values and functions without state. Reading throws WireError if a record is malformed in itself;
/// what it means for the table is the Negotiator's to judge.
///
/// A record is one byte, its RecordType, and then, without gaps and in native byte order, what
/// stands there. A list is its length u32 and the values; a text, its length u32 and the
/// characters.
// Tested in tests/hvd/negotiation/negotiator_test.cc, tests/fuzz/agreement_fuzz.cc,
// tests/fuzz/negotiator_fuzz.cc

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/types.h"

namespace hvd {

/// A RecordType says what a record is: what it says; who appends it: a rank, a leader (L) or either
/// (RL); and what follows.
enum class RecordType : std::uint8_t {
  Introduce,  ///< What these ranks send under the key. RL: IntroduceRecord
  Agree,      ///< All ranks of the set are ready for the unit. RL: id u32, Agreement
  HostReady,  ///< All ranks of the set in this domain are. A rank: id u32, Agreement
  Cut,        ///< The set's next batches, and their places. RL: set i32, list of sequence u64
  Evict,      ///< The id is free again. RL: id u32
  Leave,     ///< It submits nothing more; what it still takes part in. RL: rank i32, list of Pledge
  End,       ///< The root has decided everything. L: nothing
  Joining,   ///< It takes part in nothing until all have joined. A rank: set i32, rank i32
  JoinedUp,  ///< What was complete without it is in the log. A rank: set i32, rank i32
  Conflict,  ///< The ranks wait for different operations. RL: set i32, name, stuck ranks
  Refuse,    ///< The unit cannot be: this rank has left, or as the text says. RL: id u32, rank i32,
             ///< text
  Doubt,     ///< A query to the root: can it be complete? A rank: id u32
  Linger     ///< It is about to leave, and has sends or recvs pending (1), or none any more (-1):
             ///< the world lasts meanwhile. A rank: change i32
};

// Lists of these are copied whole.
static_assert(sizeof(OpKind) == 1);
static_assert(sizeof(Run) == 8);
static_assert(sizeof(Pledge) == 8);

/// The word that all ranks of a domain, or all ranks, are ready for a unit. Encoded: tensors u32,
/// list of u8 with a bit for each, the lowest first; `absent`, a list of i32; `last` i32.
struct Agreement {
  std::vector<bool> present;  ///< per tensor: some rank has it
  std::vector<int> absent;    ///< global ranks of the set that joined and did not submit, ascending
  int last = -1;  ///< Join: the rank that joined last; Control: the process set made or removed
};
void encode(Writer& writer, const Agreement& agreement);
/// Throws WireError on malformed input.
Agreement decode_agreement(Reader& reader);

/// Encodes it as set i32, kind u8, name.
void encode(Writer& writer, const UnitKey& key);
/// Throws WireError on malformed input.
UnitKey decode_key(Reader& reader);

/// The operation that a rank is stuck with under a name.
struct StuckRank {
  int rank = 0;
  OpKind kind = OpKind::Allreduce;
};
/// Encodes them as their number u32, then (rank i32, kind u8) each.
void encode(Writer& writer, const std::vector<StuckRank>& stuck_ranks);
/// Throws WireError on malformed input.
std::vector<StuckRank> decode_stuck_ranks(Reader& reader);

/// The content of an Introduce record, in this order; ranks are a list of Run.
struct IntroduceRecord {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  Runs ranks;
  UnitKey key;
  SharedSignature signature;
};
/// Reads what follows the type. Throws WireError on malformed input.
IntroduceRecord decode_introduction(Reader& reader);

/// Makes records. The Negotiator makes those that depend on its table, and inherits these, so that
/// whoever appends asks it alone.
struct Records {
  using Id = std::uint32_t;
  static Bytes introduction(Id id, std::uint32_t generation, const Runs& ranks, const UnitKey& key,
                            const Signature& signature) {
    return to_wire(RecordType::Introduce, id, generation, ranks, key, signature);
  }
  static Bytes eviction(Id id) { return to_wire(RecordType::Evict, id); }
  static Bytes agreement(Id id, const Agreement& what) {
    return to_wire(RecordType::Agree, id, what);
  }
  static Bytes host_readiness(Id id, const Agreement& what) {
    return to_wire(RecordType::HostReady, id, what);
  }
  /// Cuts what is agreed on the set. `sequences`: the numbers of the batches that this makes, as
  /// many as `batches_of_next_cut` says; none where no rank of this domain takes part.
  static Bytes cut_record(int process_set, std::span<const std::uint64_t> sequences) {
    return to_wire(RecordType::Cut, process_set, sequences);
  }
  static Bytes leaving(int rank, std::span<const Pledge> pledges = {}) {
    return to_wire(RecordType::Leave, rank, pledges);
  }
  /// `change`: of how many ranks have sends or recvs pending, of those that leave.
  static Bytes lingering(int change) { return to_wire(RecordType::Linger, change); }
  /// Refuses a unit whose slots are void already.
  static Bytes refusal(Id id, int rank, std::string_view text = {}) {
    return to_wire(RecordType::Refuse, id, rank, text);
  }
  /// Asks about a unit that a rank of this domain waits for, and a rank that takes part in it has
  /// left.
  static Bytes doubt(Id id) { return to_wire(RecordType::Doubt, id); }
  static Bytes end() { return to_wire(RecordType::End); }
  static Bytes joining(int process_set, int rank) {
    return to_wire(RecordType::Joining, process_set, rank);
  }
  static Bytes joined_up(int process_set, int rank) {
    return to_wire(RecordType::JoinedUp, process_set, rank);
  }
  /// Ends what the stuck ranks wait for under the name. The ids' slots are void.
  static Bytes conflict(int process_set, std::string_view name,
                        const std::vector<StuckRank>& stuck_ranks) {
    return to_wire(RecordType::Conflict, process_set, name, stuck_ranks);
  }
};

}  // namespace hvd
