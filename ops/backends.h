#pragma once
/// Room card: the one list of what can execute batches, in the order in which they are asked.

#include <memory>
#include <string>
#include <vector>

#include "hvd/engine.h"
#include "ops/arena.h"
#include "ops/bootstrap.h"

namespace hvd {

/// The backends of this process. Collective: communicators are made. `parts` has its topology, board and stats already.
std::vector<std::unique_ptr<Backend>> make_backends(const EngineParts& parts, const std::shared_ptr<Bootstrap>& bootstrap,
                                                    const DomainMemory& memory, const std::shared_ptr<Arena>& arena);

/// "NCCL 2.28.9, CUDA 13.0", or why there is none.
std::string device_description();

}  // namespace hvd
