#pragma once
/// Acts on what the ranks have said in the log: entries go on that are agreed, end that are
/// refused, and batches that were cut are queued to be run. Under the engine's mutex.
// Tested in tests/hvd/engine/engine_test.cc, tests/hvd/engine/engine_ops_test.cc

#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/fast_path/fast_path.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/engine/progress/submitter.h"

namespace hvd {

class OutcomeHandler {
 public:
  OutcomeHandler(const EngineParts& parts, NegotiationLog& log, Cutter& cutter, FastPath& fast_path,
                 BatchRunner& runner, Submitter& submitter, Ledger& ledger, SubmissionQueue& queue,
                 EngineMutex& mutex, EngineEvents& engine)
      : parts_(parts),
        log_(log),
        cutter_(cutter),
        fast_path_(fast_path),
        runner_(runner),
        submitter_(submitter),
        ledger_(ledger),
        queue_(queue),
        mutex_(mutex),
        engine_(engine) {}

  /// `said_here`: this rank has appended the record, so it also wakes whom it concerns. Throws
  /// BackendError if the ranks' tables differ.
  void handle(Outcomes& outcomes, bool said_here) HVD_REQUIRES(engine_mutex);
  /// Returns whether an entry or a repeated operation of this rank still uses the removed set.
  [[nodiscard]] bool uses(int process_set) HVD_REQUIRES(engine_mutex);

 private:
  void wake_for(const Outcomes& outcomes) HVD_REQUIRES(engine_mutex);
  void act_on_agreement(const Outcomes::Agreed& agreed) HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Cutter& cutter_;
  FastPath& fast_path_;
  BatchRunner& runner_;
  Submitter& submitter_;
  Ledger& ledger_;
  SubmissionQueue& queue_;
  EngineMutex& mutex_;
  EngineEvents& engine_;
};

}  // namespace hvd
