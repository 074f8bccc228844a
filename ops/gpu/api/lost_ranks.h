#pragma once
/// What ends a wait inside a library, by the thread that has the turn: while it waits, nobody else of this rank looks whether the others
/// live, and where all that live wait so, nobody would find that one has died.

#include <functional>
#include <vector>

#include "hvd/negotiation/board.h"

namespace hvd::nccl {

/// Returns the question whether the world has failed. It is asked often; ten times a second it looks whether a rank of the domain has died,
/// whose global number is then told as the world's failure. `ranks`: the domain's, by index. The board outlives the question and its
/// copies. One thread at a time asks each copy.
std::function<bool()> world_has_failed(Board& board, std::vector<int> ranks);

}  // namespace hvd::nccl
