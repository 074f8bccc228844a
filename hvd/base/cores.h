#pragma once
/// Says how many cores there are. Any thread; nothing fails. Where a machine has more than the
/// system's sets have room for, all of them count.
// Tested in tests/hvd/base/affinity_test.cc

#pragma GCC visibility push(default)
namespace hvd {

namespace detail {
/// Returns the number of cores that the ranks of this host may use together: those of this
/// process's cpuset, whichever of them its launcher has bound it to.
unsigned usable_cores();
/// Returns the number of cores that the calling thread is bound to, as those that it starts are.
unsigned bound_cores();
}  // namespace detail

}  // namespace hvd
#pragma GCC visibility pop
