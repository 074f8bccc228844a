#pragma once
/// PersistentCall is the common part of persistent operations (`hvd::allreduce_init` and the
/// others) on buffers and on tensors. Errors are those of hvd/hvd.h.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hvd/base/visible.h"
#include "hvd/engine/engine.h"
#include "hvd/hvd.h"

namespace hvd {

/// An operation on memory that stays. It keeps what a start needs: the submission, which was
/// checked once, and what the engine has found for it, so that the next start looks nothing up. One
/// thread at a time uses it.
class HVD_BETWEEN_LIBRARIES PersistentCall {
 public:
  /// Keeps `submission`, of one tensor, which passed Engine::check and has a name. `output`: where
  /// the result goes. Its `keep_alive`, if it has one, owns the memory and not this object.
  PersistentCall(std::shared_ptr<Engine> engine, Submission submission, void* output);
  /// Waits for an operation under way if nobody keeps its memory alive; otherwise leaves it alone.
  ~PersistentCall();
  PersistentCall(const PersistentCall&) = delete;
  PersistentCall& operator=(const PersistentCall&) = delete;

  /// Starts it; it must not be under way. Throws what Engine::submit throws, and InvalidArgument if
  /// the library was started anew since; nothing has happened then.
  void start();
  /// Waits for what was started last and throws its failure. Returns at once if none is under way.
  void wait();
  /// Returns whether `wait()` would return at once; does a little driving.
  [[nodiscard]] bool done() const;
  [[nodiscard]] bool is_under_way() const { return op_ != nullptr || pending_ != nullptr; }
  /// Returns, of an alltoall, how many rows came from each rank the last time.
  [[nodiscard]] const std::vector<std::int64_t>& received() const { return received_; }

 private:
  const World world_ = World::current();
  const std::shared_ptr<Engine> engine_;
  const Submission submission_;
  std::vector<std::int64_t> received_;
  SmallCall call_;  // refers to the submission
  bool is_small_;   // the fast path may have it
  std::weak_ptr<RepeatedOp> known_;
  // At most one of the two, while it is under way.
  std::shared_ptr<RepeatedOp> op_;
  std::shared_ptr<HandleState> pending_;
};

/// Gives the options a name if they have none: the same on all ranks that make such operations in
/// the same order. To be called last, when nothing can be refused any more.
template <class Options>
void make_name(Engine& running, OpKind kind, Options& options) {
  if (options.name.empty()) options.name = running.persistent_name(options.process_set.id(), kind);
}

/// Throws InvalidArgument unless the operation was made with the engine that this thread's calls
/// mean: the library was started anew since.
HVD_BETWEEN_LIBRARIES void require_same_engine(const std::shared_ptr<Engine>& made_with,
                                               OpKind kind, const std::string& name);
/// Throws InvalidArgument: `start()` of an operation that is under way.
[[noreturn]] HVD_BETWEEN_LIBRARIES void refuse_second_start(OpKind kind, const std::string& name);

}  // namespace hvd
