#pragma once
/// A LibraryCall stands at the beginning of each function through which a program enters the
/// library. Any thread.
// Tested in tests/ops/shm/shared_memory_test.cc

#include "hvd/base/process.h"
#include "hvd/errors.h"

namespace hvd {

/// The first step of a function of the public interface: throws NotInitialized in a process that
/// was forked from a rank; otherwise marks the thread as inside of the library.
class LibraryCall {
 public:
  LibraryCall() {
    if (is_forked_from_rank()) throw NotInitialized(describe_fork());
  }

 private:
  InsideLibrary inside_;
};

}  // namespace hvd
