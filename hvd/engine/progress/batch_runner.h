#pragma once
/// Runs batches: launches what is cut on its backend, advances what is under way, and ends the
/// entries of what is done. Batches come in under the engine's mutex; all else is done by the
/// thread that has the turn.
// Tested in tests/hvd/engine/engine_test.cc, tests/hvd/engine/cutter_test.cc

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/routes.h"

namespace hvd {

/// Keeps what a device may still read and write, for as long as the process. Any thread.
void keep_for_ever(std::shared_ptr<void> owner) noexcept;

class BatchRunner {
 public:
  /// A batch to launch.
  struct Prepared {
    CutBatch cut;
    std::vector<Entry*> entries;                        ///< per tensor
    std::vector<std::vector<std::uint64_t>> locations;  ///< per tensor, by rank of the domain
  };

  BatchRunner(const EngineParts& parts, const Negotiator& table, Cutter& cutter, EngineMutex& mutex,
              EngineEvents& engine)
      : parts_(parts), table_(table), cutter_(cutter), mutex_(mutex), engine_(engine) {}

  // ---- under the engine's mutex
  /// Takes a batch with tensors of this rank. Reads off the board where they are on each rank of
  /// the domain: later the slots may belong to other tensors.
  void enqueue(CutBatch cut, Ledger& ledger) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_queued() const HVD_REQUIRES(engine_mutex) { return !queued_.empty(); }
  /// Returns whether all that is queued is so small that whoever has completed the agreement does
  /// it at once.
  [[nodiscard]] bool has_only_small_ones() const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] std::vector<Prepared> take_queued() HVD_REQUIRES(engine_mutex) {
    return std::exchange(queued_, {});
  }

  // ---- with the turn
  /// Launches what was queued and advances all once. Returns whether there was anything to do.
  /// Throws what a backend throws.
  bool run(const Turn& turn, std::vector<Prepared> queued);
  /// Ends what is under way, with an error on the device where it has begun. Returns whether all is
  /// at rest.
  bool abort(const Turn& turn) noexcept;
  /// Returns whether a batch of the set is queued or under way.
  [[nodiscard]] bool uses(const Turn& turn, int process_set) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool is_running(const Turn& /*turn*/) const { return !running_.empty(); }
  /// Returns how this rank hears of what is under way.
  [[nodiscard]] Polling polling(const Turn& turn) const;

 private:
  struct Running {
    Prepared batch;
    Backend* backend;
    std::shared_ptr<Execution> execution;
    bool handed_over = false;
    bool retired = false;
    bool over = false;
  };

  void launch(Prepared batch) HVD_EXCLUDES(engine_mutex);
  void note_way(const Prepared& prepared, const Execution& execution);
  [[nodiscard]] Batch make_batch(const Prepared& prepared) const;
  void count(const Prepared& prepared, const Batch& batch) const;
  [[nodiscard]] BatchMember make_member(const Prepared& prepared, std::size_t index) const;
  void hand_over(Running& running) HVD_EXCLUDES(engine_mutex);
  [[nodiscard]] bool retire_enqueued() HVD_EXCLUDES(engine_mutex);
  void finish(Running& running) HVD_EXCLUDES(engine_mutex);

  const EngineParts& parts_;
  const Negotiator& table_;
  Cutter& cutter_;
  EngineMutex& mutex_;
  EngineEvents& engine_;
  std::vector<Prepared> queued_ HVD_GUARDED_BY(engine_mutex);
  std::deque<Running> running_;  // of the thread that has the turn, as is the next
  std::set<std::pair<std::string, RouteChoice>> told_ways_;
};

}  // namespace hvd
