#pragma once
/// EngineParts are the parts of an engine that come from outside; all others may look at them.
// Tested in tests/hvd/engine/engine_test.cc

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/backend.h"
#include "hvd/base/text.h"
#include "hvd/config.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/stats.h"
#include "hvd/timeline/timeline.h"
#include "hvd/topology.h"
#include "hvd/transport.h"

namespace hvd {

/// The parts of an engine. `init()` makes them, or a test; the engine then owns them.
struct EngineParts {
  Config config;
  Topology topology;
  std::string world = {};                    ///< its name; empty: the global one
  std::vector<ProcessSetInfo> process_sets;  ///< the first is the global one
  std::shared_ptr<void> memory;  ///< what the board and the backends stand on; released last
  std::unique_ptr<Board> board;
  std::shared_ptr<StatsCounters> stats = std::make_shared<StatsCounters>();
  std::unique_ptr<Timeline> timeline = std::make_unique<Timeline>();
  std::unique_ptr<Transport> transport;  ///< of a domain's leader where there are several; or null
  std::unique_ptr<Transport> alarm;      ///< of its other ranks: to tell the leaders elsewhere of a
                                         ///< failure when their own is dead
  std::unique_ptr<Transport> peers;  ///< between all ranks, for send and recv; null in one domain
  std::vector<std::unique_ptr<Backend>> backends;  ///< the first that supports a batch runs it
  static constexpr int kNoGpu = -2;
  int device = -1;  ///< CUDA's index of the GPU that all GPU tensors of this rank must be on; -1:
                    ///< any; kNoGpu: there can be none. In a world of one: any
  /// Called by the coordination thread before it drives anything, once the others can see it die;
  /// false: it is not to begin. May block.
  std::function<bool()> may_begin;

  /// Returns the backend that runs such batches; null if none does. Any thread.
  [[nodiscard]] Backend* backend_for(const BatchTraits& traits) const {
    const auto found = std::find_if(backends.begin(), backends.end(),
                                    [&](const auto& backend) { return backend->supports(traits); });
    return found == backends.end() ? nullptr : found->get();
  }
  /// Returns what ends this rank's part in the world in order: "hvd::shutdown()", or that of a
  /// world by its name.
  [[nodiscard]] std::string end_call() const {
    return world.empty() ? "hvd::shutdown()"
                         : formatted("leave() or shutdown() of the world '{}'", world);
  }
  [[nodiscard]] bool is_here(int rank) const {
    return topology.domain_of_rank[static_cast<std::size_t>(rank)] == topology.domain;
  }
};

using Clock = std::chrono::steady_clock;

/// The bit of a rank's word for a tensor that says that the rank has nothing to contribute
/// (TensorArgument::present).
inline constexpr std::uint64_t kAbsent = std::uint64_t{1} << 63;

inline BatchTraits traits_of(const Signature& signature, DataType dtype, Device device,
                             const ProcessSetInfo& set) {
  return {signature, dtype, device, &set};
}

}  // namespace hvd
