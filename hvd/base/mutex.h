#pragma once
/// Declares the attributes of clang's thread-safety analysis (https://clang.llvm.org/docs/ThreadSafetyAnalysis.html) under names of the
/// project; other compilers see nothing of them. tests/thread_safety.sh checks them with -Wthread-safety as an error.
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
