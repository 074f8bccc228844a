#pragma once
/// meet_in_store() brings the ranks of a job together without MPI: rank 0 opens the store, all connect to it, and say who they are. It is
/// for the caller of `init()`. It throws InvalidArgument or BackendError, which name the mistake, on all ranks that can be told; ranks that
/// do not come in time are named.

#include <chrono>
#include <memory>

#include "hvd/launch/launch.h"
#include "ops/rendezvous/rendezvous.h"

namespace hvd {

/// Collective. `launch` says who this rank is and where the store is to be; `patience`: how long all may take to come.
std::unique_ptr<Rendezvous> meet_in_store(const Launch& launch, std::chrono::milliseconds patience);

}  // namespace hvd
