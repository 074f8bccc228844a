#pragma once
/// The source of a ResultPool's blocks: this rank's arena, where the next operation on a result
/// needs no copy of it, or, where ranks share no memory, memory of this process alone. Any thread.
/// The objects keep the memory mapped. Null where there is no more.

#include <memory>

#include "hvd/api/result_pool.h"
#include "ops/shm/memory/arena.h"

namespace hvd {

/// `owner` keeps the arena's mapping.
std::shared_ptr<ResultMemory> arena_results(std::shared_ptr<Arena> arena,
                                            std::shared_ptr<void> owner);
std::shared_ptr<ResultMemory> private_results();

}  // namespace hvd
