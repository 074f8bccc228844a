#pragma once
/// within() makes a call that may hang, and goes on without it after a while. It is for the ends of things (ncclCommAbort, when a network
/// is gone or a kernel of the user's does not end): nobody who waits for a result may hang because they do. Any thread; never throws.
// Tested in tests/ops/gpu/nccl/nccl_failure_test.cc

#include <chrono>
#include <functional>

namespace hvd::gpu {

/// Calls `work`, which must not throw, in a thread of its own. Returns true when it has ended, and false after `limit` if it has not: the
/// thread is then left to itself until the process ends, so `work` owns what it uses. Where no thread can be had, calls it in this one.
bool within(std::chrono::milliseconds limit, std::function<void()> work) noexcept;

}  // namespace hvd::gpu
