#pragma once
/// What tests do to an engine, and ask of it, that nobody else does.

#include <algorithm>
#include <cstddef>

#include "hvd/engine/engine.h"

namespace hvd {

class EngineProbe {
 public:
  /// The coordination thread ends as if the process had been killed.
  static void die(Engine& engine) { engine.loop_.die(); }
  /// Calls `work` while this thread has the engine's mutex.
  template <class Work>
  static void hold_mutex(Engine& engine, const Work& work) {
    const EngineLock lock(engine.mutex_);
    work();
  }
  /// Returns how many batches and rounds of this rank took the way.
  static std::uint64_t taken(const Engine& engine, RouteChoice way) {
    const auto counted = [&](const auto& counters) {
      return way.access == Access::None
                 ? counters.routes[static_cast<std::size_t>(way.route)].load()
                 : counters.accesses[static_cast<std::size_t>(way.access)].load();
    };
    const auto& stats = *engine.parts_.stats;
    return counted(stats) + counted(stats.fast_path);
  }
  /// Returns how many repeated operations there are, and gives back what they keep. None may be
  /// in use.
  static std::size_t drop_repeated(Engine& engine) {
    const EngineLock lock(engine.mutex_);
    return engine.fast_path_.ops().drop_all();
  }
  /// Return what is kept of tensors and of process sets, in this rank's tables and its leader tree.
  static std::size_t tensors_kept(Engine& engine) {
    const EngineLock lock(engine.mutex_);
    return std::max(engine.log_.table().units_kept(),
                    engine.leader_ ? engine.leader_->tensors_kept() : 0);
  }
  static std::size_t sets_kept(Engine& engine) {
    const EngineLock lock(engine.mutex_);
    return engine.log_.table().sets().count() + engine.queue_.sets_kept() +
           (engine.leader_ ? engine.leader_->sets_and_names_kept() : 0);
  }
};

}  // namespace hvd
