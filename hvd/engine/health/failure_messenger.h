#pragma once
/// Tells the other domains that the world has failed, which they cannot see by themselves. A domain's leader speaks for it; where that is
/// dead, the first of its ranks that live. By the thread that has the turn. Never throws.

#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"

namespace hvd {

class LeaderTask;

class FailureMessenger {
 public:
  /// `leader`: null where this rank leads no domain.
  FailureMessenger(const EngineParts& parts, LeaderTask* leader, EngineMutex& mutex) : parts_(parts), leader_(leader), mutex_(mutex) {}

  /// Tells the others, if this rank speaks for its domain.
  void tell(const Turn& turn, const Status& status) noexcept HVD_EXCLUDES(engine_mutex);
  /// Lets what was told reach the others; to be called again and again.
  void drain(const Turn& turn) noexcept HVD_EXCLUDES(engine_mutex);

 private:
  const EngineParts& parts_;
  LeaderTask* const leader_;
  EngineMutex& mutex_;
};

}  // namespace hvd
