#pragma once
/// Decides when what is agreed becomes batches, and owns their places on the board: the only part that opens, retires and departs. One
/// batch of a scope is open at a time, so that what is agreed meanwhile can share the next one; a cut that the board has no place for
/// waits. Under the engine's mutex.

#include <cstdint>
#include <functional>
#include <vector>

#include "hvd/engine/engine_lock.h"
#include "hvd/engine/parts.h"
#include "hvd/negotiation/negotiation_log.h"

namespace hvd {

class Cutter {
 public:
  /// Of the log, for the cut that may follow an agreement.
  static constexpr std::size_t kCutBytes = 64;

  Cutter(const EngineParts& parts, NegotiationLog& log, EngineMutex& mutex);

  /// Cuts what this domain has agreed, if no batch is open. `log` has `kCutBytes` to spare.
  void cut_if_idle(Transaction& log) HVD_REQUIRES(engine_mutex, board_lock);
  /// Cuts the world's next batches, which the root announces, after `announce`. False, and nothing has happened, if the board has no room
  /// for them yet.
  bool cut_world(const std::function<void()>& announce) HVD_REQUIRES(engine_mutex);
  /// Root: whether those cut before are over, or none of this domain's affair.
  bool is_world_idle() HVD_REQUIRES(engine_mutex);

  /// This rank is done with the batch. The first rank to say so lets the next one be cut.
  void retire(const CutBatch& cut) HVD_REQUIRES(engine_mutex);

 private:
  struct WorldCut {
    std::uint64_t sequence;
    bool here;  ///< this domain takes part, so it will see the end
  };

  const EngineParts& parts_;
  NegotiationLog& log_;
  EngineMutex& mutex_;
  Board& board_;
  std::vector<WorldCut> open_world_cuts_ HVD_GUARDED_BY(engine_mutex);  ///< root
  bool told_of_no_room_ HVD_GUARDED_BY(engine_mutex) = false;
};

}  // namespace hvd
