#pragma once
/// Names the two locks of a rank for clang's thread-safety analysis, in the order in which they are taken. They stand for any engine's
/// and any board's: a thread never holds those of two.
// Tested in tests/thread_safety.sh

#include "hvd/base/mutex.h"

namespace hvd {

struct HVD_CAPABILITY("the engine's mutex") EngineMutexCapability {};
struct HVD_CAPABILITY("the board's lock") BoardLockCapability {};

/// Held by a thread of a rank; orders everything that the rank's threads do to its table, its ledger and its queues.
inline EngineMutexCapability engine_mutex;
/// Held by a rank of a domain, for microseconds; orders what the ranks append to the log.
inline BoardLockCapability board_lock HVD_ACQUIRED_AFTER(engine_mutex);

}  // namespace hvd
