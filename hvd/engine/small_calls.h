#pragma once
/// The callers of repeated small operations (hvd/engine/core/repeated_op.h): starts their rounds
/// on the fast path, gives the other ranks a moment for them, and takes the results. Any thread,
/// but for what needs the engine's mutex.
// Tested in tests/hvd/engine/fast_path_test.cc

#include <cstdint>
#include <memory>
#include <optional>

#include "hvd/base/visible.h"
#include "hvd/engine/core/burst.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/fast_path/fast_path.h"
#include "hvd/engine/leader/leader_task.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/engine/progress/progress_loop.h"
#include "hvd/engine/progress/submitter.h"

namespace hvd {

/// After says what a caller does next: it goes on; it waits at once, and so will drive the engine
/// itself; or it comes back with the same submission, once it has waited for this one.
enum class After : std::uint8_t { Return, Wait, Repeat };

class SmallCalls {
 public:
  /// `leader`: null for a rank that does not lead its domain.
  SmallCalls(const EngineParts& parts, EngineMutex& mutex, Burst& burst, FastPath& fast_path,
             BatchRunner& runner, Submitter& submitter, LeaderTask* leader, ProgressLoop& loop)
      : parts_(parts),
        board_(*parts.board),
        mutex_(mutex),
        burst_(burst),
        fast_path_(fast_path),
        runner_(runner),
        submitter_(submitter),
        leader_(leader),
        loop_(loop) {}

  /// Submits the operation and waits for it, without memory from the heap, if this rank has a
  /// repeated operation for it: if it has been submitted twice before by a caller that waited.
  /// Returns false, and nothing has happened, if not: it is to be submitted. Throws as
  /// `Engine::wait` does.
  HVD_BETWEEN_LIBRARIES bool try_run(const SmallCall& call);
  /// Returns what `try_run` returns true for, and does not wait for it: `finish` or `abandon` must
  /// follow, with the same call. Null, and nothing has happened, if there is none. `after`: Wait or
  /// Repeat.
  std::shared_ptr<RepeatedOp> start(const SmallCall& call, After after);
  /// Waits for what `start` has returned. Throws as `Engine::wait` does.
  void finish(RepeatedOp& op, const SmallCall& call);
  /// Leaves it to itself: `owner` (not null) owns its memory, and is released when it has ended.
  void abandon(const std::shared_ptr<RepeatedOp>& op, std::shared_ptr<void> owner);
  /// Starts what its caller waits for by the state that is returned, if there is a repeated
  /// operation for it: as `Engine::submit` does, without a submission. `owner` owns its memory.
  /// Null, and nothing has happened, if there is none. Throws as `submit` does.
  std::shared_ptr<HandleState> start_unowned(const SmallCall& call,
                                             const std::shared_ptr<void>& owner);
  /// The same for a submission.
  std::shared_ptr<HandleState> start_of(const Submission& submission);

  /// Gives the other ranks a moment for the round that this is the state of, if it is one's, and
  /// ends what can be ended.
  void await(const HandleState& pending);
  /// Ends the rounds that all ranks have arrived in. Never throws.
  void end_complete() HVD_REQUIRES(engine_mutex);
  /// The same, if there may be some.
  void end_gathered();

 private:
  enum class Work : std::uint8_t { None, Small, Large };
  bool may_start() HVD_REQUIRES(engine_mutex);
  Work work_left(bool in_burst) HVD_REQUIRES(engine_mutex);
  std::optional<RepeatedOp::Awaited> find_round(const HandleState& pending);
  void await_round(const RepeatedOp::Awaited& round, const HandleState& pending);
  void drive_direct(const RepeatedOp::Awaited& round, const HandleState& pending);

  const EngineParts& parts_;
  Board& board_;
  EngineMutex& mutex_;
  Burst& burst_;
  FastPath& fast_path_;
  BatchRunner& runner_;
  Submitter& submitter_;
  LeaderTask* const leader_;
  ProgressLoop& loop_;
};

}  // namespace hvd
