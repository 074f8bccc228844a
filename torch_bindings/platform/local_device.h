#pragma once
/// The share of a host that is a rank's: the device that it works on, and a part of the cores.
/// `init()` arranges both.
// Tested in tests/torch_bindings/training/training_helpers_test.cc

#include <ATen/Device.h>

#pragma GCC visibility push(default)
namespace hvd {

/// Returns the device on which this rank's model and data belong: of the GPUs that it sees, the one
/// at `local_rank()` modulo their number; the CPU where there is none, or LibTorch or this library
/// were built without. GPU tensors of a world of several ranks must be on it. `init()` makes it
/// current in its thread, so that `to(torch::kCUDA)` there means it; in other threads that means
/// the first GPU. Any thread. Throws NotInitialized.
at::Device local_device();

namespace detail {

/// Has `init()` make the device current. Called once, at static initialisation of any program that
/// includes <hvd/torch.h>.
bool make_device_current_at_init();

/// Has `init()` give LibTorch cores / local ranks threads, at most one for each core that its
/// caller is bound to, unless the user has fixed their number (OMP_NUM_THREADS, MKL_NUM_THREADS):
/// more would make the ranks of a host fight for its cores.
/// Called likewise.
bool share_cores_at_init();

inline const bool kDeviceIsMadeCurrent = make_device_current_at_init();
inline const bool kCoresAreShared = share_cores_at_init();

}  // namespace detail
}  // namespace hvd
#pragma GCC visibility pop
