#pragma once
/// Takes submissions in: admits them to the ledger or to the queue, prepares their memory, and
/// announces them to the other ranks. Says why it takes none any more. Under the engine's mutex,
/// but for `prepare`.
// Tested in tests/hvd/engine/submitter_test.cc, tests/hvd/engine/engine_test.cc,
// tests/hvd/engine/controller_test.cc

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/agreement/entry_factory.h"
#include "hvd/engine/agreement/leavers.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/events.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/submission_queue.h"
#include "hvd/engine/progress/progress_loop.h"

namespace hvd {

/// Returns what an operation on a process set that is gone fails with.
[[nodiscard]] std::string removed_text(const UnitKey& key);

class Submitter {
 public:
  Submitter(const EngineParts& parts, NegotiationLog& log, const EntryFactory& factory,
            Controller& controller, Leavers& leavers, Ledger& ledger, SubmissionQueue& queue,
            EngineMutex& mutex, EngineEvents& engine)
      : parts_(parts),
        log_(log),
        factory_(factory),
        controller_(controller),
        leavers_(leavers),
        ledger_(ledger),
        queue_(queue),
        mutex_(mutex),
        engine_(engine),
        board_(*parts.board) {}

  // ---- a submission's way, in this order
  /// Waits for what was submitted before a join, which takes part in it. `lock` is the engine's
  /// mutex; it is free meanwhile.
  void wait_for_earlier(EngineLock& lock, const UnitKey& key, ProgressLoop& loop)
      HVD_REQUIRES(engine_mutex);
  /// Takes the entry in. Returns null if it waits for its name, which is in flight. `numbered`: it
  /// had no name, and was given one. Throws DuplicateName, Joined, InvalidArgument, Shutdown, or
  /// what ended the world; then the entry stays the caller's, who destroys it without the mutex.
  Entry* admit(std::unique_ptr<Entry>&& fresh, bool& numbered) HVD_REQUIRES(engine_mutex);
  /// Brings the entry's tensors to where the backends want them. Throws what a backend throws; the
  /// entry is out of the ledger then.
  void prepare(Entry& entry, bool numbered) HVD_EXCLUDES(engine_mutex);
  void note_submission(Entry& entry) HVD_REQUIRES(engine_mutex);
  /// Announces the entry to the other ranks. Returns false if there is no room in the table just
  /// now; to be called again when others have read the log. `gathers`: if it completes the entry,
  /// that is cut when this rank drives, and what has come until then travels with it.
  bool announce(Entry& entry, bool gathers = false) HVD_REQUIRES(engine_mutex);
  /// This rank is the `arrived`th to be ready for the entry: agrees on it if that completes it.
  void arrived(const Entry& entry, std::uint32_t arrived, bool gathers = false)
      HVD_REQUIRES(engine_mutex);

  /// Announces submissions whose name is free now.
  bool announce_waiting() HVD_REQUIRES(engine_mutex);

  /// Throws, if nothing is taken any more, why: Shutdown, or what ended the world.
  void require_open() HVD_REQUIRES(engine_mutex);

  // ---- the end
  /// Submissions are refused from now on, as shutdown() has been called. Returns whether they were
  /// already.
  bool stop() HVD_REQUIRES(engine_mutex) { return std::exchange(stopping_, true); }
  [[nodiscard]] bool is_stopping() const HVD_REQUIRES(engine_mutex) {
    return stopping_ || !over_.ok();
  }
  /// Ends what waits in the queue, and whatever comes, with `status`, or with what was said first.
  void refuse_all(const Status& status) HVD_REQUIRES(engine_mutex);
  /// Ends submissions that the queue had.
  void fail(std::deque<std::unique_ptr<Entry>> waiting, const Status& status)
      HVD_REQUIRES(engine_mutex);

 private:
  const EngineParts& parts_;
  NegotiationLog& log_;
  const EntryFactory& factory_;
  Controller& controller_;
  Leavers& leavers_;
  Ledger& ledger_;
  SubmissionQueue& queue_;
  EngineMutex& mutex_;
  EngineEvents& engine_;
  Board& board_;
  Status over_ HVD_GUARDED_BY(engine_mutex);  ///< why submissions are refused
  bool stopping_ HVD_GUARDED_BY(engine_mutex) = false;
};

}  // namespace hvd
