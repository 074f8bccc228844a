#pragma once
/// How many threads LibTorch may use: cores / local ranks, set at `init()` unless the user has fixed the number
/// (OMP_NUM_THREADS, MKL_NUM_THREADS). More would make the ranks of a host fight for its cores.

#pragma GCC visibility push(default)
namespace hvd::detail {
/// Registers itself with `init()`; called once, at static initialisation of any program that includes <hvd/torch.h>.
bool share_cores_at_init();
inline const bool kCoresAreShared = share_cores_at_init();
}  // namespace hvd::detail
#pragma GCC visibility pop
