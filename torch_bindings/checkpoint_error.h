#pragma once
/// What is thrown, on all ranks, where a checkpoint or another file cannot be written or read.

#include "hvd/errors.h"

namespace hvd {

/// A checkpoint that cannot be written or read; the text names the file, the rank, what is wrong.
struct CheckpointError : Error {
  using Error::Error;
};

}  // namespace hvd
