#pragma once
/// make_world() puts a world together. Its steps are collective and in the same order on all ranks; each that can fail on one rank alone is
/// followed by an agreement, so that it fails on all.
// Tested in tests/system/scripts/process_starts.sh, tests/torch_bindings/collectives/world_test.cc

#include <functional>
#include <memory>
#include <string>

#include "hvd/api/world.h"
#include "hvd/config.h"
#include "ops/bootstrap.h"

namespace hvd {

/// Called when a world has ended in order on all ranks, with what its ranks met by.
using WhenEnded = std::function<void(const Bootstrap& bootstrap)>;

/// Collective, inside of a call of this rank's. `name`: empty for the global world. Throws what Bootstrap throws, and BackendError for what
/// the system refuses.
RunningWorld make_world(const Config& config, const std::shared_ptr<Bootstrap>& bootstrap, const std::string& name, const WhenEnded& ended);

}  // namespace hvd
