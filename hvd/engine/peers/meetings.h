#pragma once
/// Meetings are the calls of barrier_until: the k-th of each rank belong together. A rank announces
/// its own and sees which others have not come: those of its domain on the board, all others by the
/// frames that they send. Under the engine's mutex. Nothing blocks.
// Tested in tests/hvd/engine/meetings_test.cc

#include <cstdint>
#include <vector>

#include "hvd/engine/core/parts.h"
#include "hvd/engine/peers/peer_attention.h"
#include "hvd/engine/peers/peer_departures.h"
#include "hvd/engine/peers/peer_links.h"

namespace hvd {

class Meetings {
 public:
  Meetings(const EngineParts& parts, PeerLinks& links, PeerAttention& attention,
           PeerDepartures& departures)
      : parts_(parts),
        links_(links),
        attention_(attention),
        departures_(departures),
        heard_(static_cast<std::size_t>(parts.topology.size)) {}

  /// This rank has come to its next meeting, and waits for others until `stop_waiting`. Returns the
  /// meeting's number, from 1.
  std::uint64_t come() HVD_REQUIRES(engine_mutex);
  /// A rank of another domain has come to so many.
  void hear(int from, std::uint64_t meetings) HVD_REQUIRES(engine_mutex);
  void stop_waiting() HVD_REQUIRES(engine_mutex) { attention_.ignore_elsewhere(); }
  /// Returns the ranks missing at that meeting, ascending. `is_hopeless`: they have all left, and
  /// left behind all that they have sent.
  [[nodiscard]] std::vector<int> missing(std::uint64_t meeting, bool& is_hopeless)
      HVD_REQUIRES(engine_mutex);

 private:
  const EngineParts& parts_;
  PeerLinks& links_;
  PeerAttention& attention_;
  PeerDepartures& departures_;
  std::vector<std::uint64_t> heard_ HVD_GUARDED_BY(engine_mutex);  ///< by rank
  std::uint64_t come_ HVD_GUARDED_BY(engine_mutex) = 0;
};

}  // namespace hvd
