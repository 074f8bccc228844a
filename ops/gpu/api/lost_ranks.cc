#include "ops/gpu/api/lost_ranks.h"

#include <chrono>
#include <utility>

#include "hvd/base/text.h"

namespace hvd::gpu {

std::function<bool()> world_has_failed(DomainLife life, std::vector<int> ranks) {
  using Clock = std::chrono::steady_clock;
  return [life = std::move(life), ranks = std::move(ranks), next = Clock::time_point()]() mutable {
    if (life.failed()) return true;
    if (Clock::now() < next) return false;
    next = Clock::now() + std::chrono::milliseconds(100);
    const auto dead = life.find_dead();
    if (!dead) return false;
    life.set_failure(
        {Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()", ranks.at(static_cast<std::size_t>(*dead)))});
    return true;
  };
}

}  // namespace hvd::gpu
