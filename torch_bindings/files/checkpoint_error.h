#pragma once
/// Declares what is thrown, on all ranks, where a checkpoint or another file cannot be written or
/// read.
// Tested in tests/torch_bindings/checkpoint/checkpoint_test.cc

#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd {

/// CheckpointError: a checkpoint cannot be written or read. The text names the file, the rank, what
/// is wrong.
struct CheckpointError : Error {
  using Error::Error;
};

}  // namespace hvd
#pragma GCC visibility pop
