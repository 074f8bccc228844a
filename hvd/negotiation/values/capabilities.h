#pragma once
/// Declares the attributes of clang's thread-safety analysis
/// (https://clang.llvm.org/docs/ThreadSafetyAnalysis.html) under names of the project, and names
/// the two locks of a rank for it, in the order in which they are taken. These stand for any
/// engine's and any board's: a thread never holds those of two. Other compilers see nothing of the
/// attributes. tests/thread_safety.sh checks them with -Wthread-safety as an error.
// Tested in tests/thread_safety.sh

#if defined(__clang__)
#define HVD_ANNOTATION(x) __attribute__((x))
#else
#define HVD_ANNOTATION(x)
#endif

#define HVD_CAPABILITY(name) HVD_ANNOTATION(capability(name))
#define HVD_SCOPED_CAPABILITY HVD_ANNOTATION(scoped_lockable)
#define HVD_GUARDED_BY(...) HVD_ANNOTATION(guarded_by(__VA_ARGS__))
#define HVD_REQUIRES(...) HVD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HVD_EXCLUDES(...) HVD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define HVD_ACQUIRE(...) HVD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HVD_RELEASE(...) HVD_ANNOTATION(release_capability(__VA_ARGS__))
#define HVD_ACQUIRED_AFTER(...) HVD_ANNOTATION(acquired_after(__VA_ARGS__))
#define HVD_NO_THREAD_SAFETY_ANALYSIS HVD_ANNOTATION(no_thread_safety_analysis)

namespace hvd {

struct HVD_CAPABILITY("the engine's mutex") EngineMutexCapability {};
struct HVD_CAPABILITY("the board's lock") BoardLockCapability {};

/// Held by a thread of a rank; orders everything that the rank's threads do to its table, its
/// ledger and its queues.
inline EngineMutexCapability engine_mutex;
/// Held by a rank of a domain, for microseconds; orders what the ranks append to the log.
inline BoardLockCapability board_lock HVD_ACQUIRED_AFTER(engine_mutex);

}  // namespace hvd
