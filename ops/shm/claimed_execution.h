#pragma once
/// An allreduce among ranks that share memory: whatever rank has time claims chunks of the batch, reduces them in rank order, and writes
/// the results into every rank's block, or its own straight to the output. The thread that has the turn drives it. It fails with
/// BackendError.
// Tested in tests/contract/allreduce_cases.cc, tests/hvd/engine/engine_test.cc

#include <memory>

#include "hvd/backend.h"
#include "ops/shm/context.h"

namespace hvd {

std::unique_ptr<Execution> make_claimed_execution(ShmContext& context, Batch batch);

}  // namespace hvd
