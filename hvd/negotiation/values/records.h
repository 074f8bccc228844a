#pragma once
/// The records of a domain's log: what each is for, how it is laid out, how it is made and read.
/// Values and functions without state. Reading throws WireError if a record is malformed in itself;
/// what it means for the table is the Negotiator's to judge.
///
/// A record is one byte, its RecordType, and then, without gaps and in native byte order:
///
///   record     after the type                                  said by
///              it says
///   Introduce  id u32, generation u32, ranks, key, signature   a rank, a leader
///              what these ranks send under the key
///   Agree      id u32, agreement                               a rank, a leader
///              all ranks of the set are ready for the unit
///   HostReady  id u32, agreement                               a rank
///              all ranks of the set in this domain are
///   Cut        set i32, list of sequence u64                   a rank, a leader
///              the set's next batches, and their places
///   Evict      id u32                                          a rank, a leader
///              the id is free again
///   Leave      rank i32, list of (id u32, rounds u32)          a rank, a leader
///              it submits nothing more; what it takes part in
///   End                                                        a leader
///              the root has decided everything
///   Joining    set i32, rank i32                               a rank
///              it takes part in nothing until all have joined
///   JoinedUp   set i32, rank i32                               a rank
///              what was complete without it is in the log
///   Conflict   set i32, name, stuck ranks                      a rank, a leader
///              the ranks wait for different operations
///   Refuse     id u32, rank i32, text                          a rank, a leader
///              the unit cannot be: this rank has left, or what the text says
///   Doubt      id u32                                          a rank
///              a query to the root: can it be complete?
///
/// where
///
///   list         count u32, then the values
///   name, text   count u32, then the characters
///   key          set i32, kind u8, name
///   ranks        list of (first i32, count i32): ranks that follow one another; ascending, no two
///                touch
///   signature    as `encode` of hvd/negotiation/values/signature.h
///   agreement    tensors u32, list of u8 with a bit for each, the lowest first; absent: list of
///                i32; last: i32
///   stuck ranks  count u32, then (rank i32, kind u8) each
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

enum class RecordType : std::uint8_t {
  Introduce,
  Agree,
  HostReady,
  Cut,
  Evict,
  Leave,
  End,
  Joining,
  JoinedUp,
  Conflict,
  Refuse,
  Doubt
};

// Lists of these are copied whole.
static_assert(sizeof(OpKind) == 1);
static_assert(sizeof(Run) == 8);
static_assert(sizeof(Pledge) == 8);

/// The word that all ranks of a domain, or all ranks, are ready for a unit.
struct Agreement {
  std::vector<bool> present;  ///< per tensor: some rank has it
  std::vector<int> absent;    ///< global ranks of the set that joined and did not submit, ascending
  int last = -1;  ///< Join: the rank that joined last; Control: the process set made or removed
};
void encode(Writer& writer, const Agreement& agreement);
/// Throws WireError on malformed input.
Agreement decode_agreement(Reader& reader);

void encode(Writer& writer, const UnitKey& key);
/// Throws WireError on malformed input.
UnitKey decode_key(Reader& reader);

/// The operation that a rank is stuck with under a name.
struct StuckRank {
  int rank = 0;
  OpKind kind = OpKind::Allreduce;
};
void encode(Writer& writer, const std::vector<StuckRank>& stuck_ranks);
/// Throws WireError on malformed input.
std::vector<StuckRank> decode_stuck_ranks(Reader& reader);

/// The content of an Introduce record.
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
  static Bytes introduction(std::uint32_t id, std::uint32_t generation, const Runs& ranks,
                            const UnitKey& key, const Signature& signature);
  static Bytes eviction(std::uint32_t id);
  static Bytes agreement(std::uint32_t id, const Agreement& what);
  static Bytes host_readiness(std::uint32_t id, const Agreement& what);
  /// Cuts what is agreed on the set. `sequences`: the numbers of the batches that this makes, as
  /// many as `batches_of_next_cut` says; none where no rank of this domain takes part.
  static Bytes cut_record(int process_set, std::span<const std::uint64_t> sequences);
  /// `rank` submits nothing more. `pledges`: what it still takes part in.
  static Bytes leaving(int rank, std::span<const Pledge> pledges = {});
  /// The unit can never be complete, because `rank` has left, or will not submit it for the reason
  /// in `text`. Its slots are void already.
  static Bytes refusal(std::uint32_t id, int rank, std::string_view text = {});
  /// A rank of this domain waits for the unit, and a rank that takes part in it has left: queries
  /// the root whether it can be complete.
  static Bytes doubt(std::uint32_t id);
  /// The root has said its last word: all ranks of all domains have left.
  static Bytes end();
  /// `rank` takes part in nothing of the set until all its ranks have joined.
  static Bytes joining(int process_set, int rank);
  /// The log now has all that the domain was ready for without the rank.
  static Bytes joined_up(int process_set, int rank);
  /// All ranks of the set wait under one name, for different operations. The ids' slots are void.
  static Bytes conflict(int process_set, std::string_view name,
                        const std::vector<StuckRank>& stuck_ranks);
};

}  // namespace hvd
