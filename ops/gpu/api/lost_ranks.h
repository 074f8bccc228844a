#pragma once
/// The end of a wait inside a library, for the thread that has the turn: while it waits, nobody else of this rank looks whether the others
/// live, and where all that live wait so, nobody would find that one has died.

#include <functional>
#include <optional>
#include <vector>

#include "hvd/errors.h"

namespace hvd::gpu {

/// The calls to the domain about its ranks' lives (hvd/negotiation/board/board.h).
struct DomainLife {
  std::function<bool()> failed;                            ///< whether the world has
  std::function<std::optional<int>()> find_dead;           ///< the index of a rank that has died, if any has
  std::function<void(const Status& failure)> set_failure;  ///< tells all
};

/// Returns the question whether the world has failed. It is asked often; ten times a second it looks whether a rank of the domain has died,
/// whose global number is then told as the world's failure. `ranks`: the domain's, by index. One thread at a time asks each copy.
std::function<bool()> world_has_failed(DomainLife life, std::vector<int> ranks);

}  // namespace hvd::gpu
