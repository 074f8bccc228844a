#pragma once
/// What the files of the engine share, and nobody else includes. Each of them is a part of the way that hvd/engine/engine.h
/// draws:
///   engine_submit.cc    what a user gives becomes an entry of the ledger
///   engine_announce.cc  it is introduced to the other ranks, arrives, and is agreed
///   engine_fast_path.cc small operations that come back
///   engine_log.cc       what the ranks have said, and what follows from it
///   engine.cc           making an engine, and driving it: batches launched, advanced, finished; `wait`, `poll`, the coordination thread
///   engine_ends.cc      how an entry, a world and an engine end

#include <chrono>
#include <cstdint>
#include <string>

#include "hvd/engine/engine.h"

namespace hvd {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

inline constexpr std::uint64_t kAbsent = std::uint64_t{1} << 63;  // of a location: this rank has nothing to say
inline constexpr std::uint64_t kUnnamedNames = 256;  // per operation and process set; beyond as many in flight, submissions wait their turn
inline constexpr int kSpins = 300;  // before sleeping, where every rank has a core: about 10 us. 2000 cost 17 to 67 us at the median where
                                    // the partner had lost its core
inline constexpr auto kGraceForDecisions = 2s;

inline bool reduces(OpKind kind) { return kind == OpKind::Allreduce || kind == OpKind::Reducescatter; }

inline BatchTraits traits_of(const Signature& signature, DataType dtype, Device device, const ProcessSetInfo& set) {
  return {signature.kind, dtype, signature.op, device, signature.prescale_factor, signature.postscale_factor, signature.root, &set};
}

/// Of the log, for the record and for evictions that make room for it; never too few.
std::size_t introduction_bytes(const UnitKey& key, const Signature& signature);
std::string joined_text(const UnitKey& key, int rank);
std::string removed_text(const UnitKey& key);

}  // namespace hvd
