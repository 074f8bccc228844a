#include "hvd/engine/small_calls.h"

#include <algorithm>
#include <array>
#include <utility>

#include "hvd/engine/core/caller_threads.h"

namespace hvd {

namespace {

constexpr std::chrono::nanoseconds kNoDeadline{0};

}  // namespace

bool SmallCalls::try_run(const SmallCall& call) {
  const auto op = start(call, After::Wait);
  if (op) finish(*op, call);
  return op != nullptr;
}

std::shared_ptr<RepeatedOp> SmallCalls::start(const SmallCall& call, After after) {
  const LibraryCall inside;
  if (call.deadline != kNoDeadline) return nullptr;
  std::shared_ptr<RepeatedOp> op;
  Work work = Work::None;
  {
    const EngineLock lock(mutex_);
    if (!may_start()) return nullptr;
    const bool in_burst = burst_.fast() > 0;
    op = fast_path_.start(call, after == After::Wait);
    const bool waits = after == After::Wait;  // and then drives, unless the operation is done
    if (op && (!waits || op->pending->done.load())) work = work_left(in_burst || waits);
  }
  if (work != Work::None) loop_.drive_or_call(work == Work::Small);
  return op;
}

/// Returns whether an operation may start this way. Where it may not, submit() knows what to say.
bool SmallCalls::may_start() {
  return !submitter_.is_stopping() && !board_.failed() && !parts_.timeline->on();
}

/// Returns what there is to drive after an operation has been started whose caller does not wait.
/// Of a burst's the first alone travels at once.
SmallCalls::Work SmallCalls::work_left(bool in_burst) {
  if (runner_.has_queued()) return runner_.has_only_small_ones() ? Work::Small : Work::Large;
  return leader_ && !in_burst ? Work::Small : Work::None;
}

/// Starts what nobody comes back for but by its state, if there is a repeated operation. Null,
/// and nothing has happened, if not.
std::shared_ptr<HandleState> SmallCalls::start_of(const Submission& submission) {
  std::array<SmallTensor, limit(Limit::GroupTensors)> group;
  const auto& tensors = submission.tensors;
  SmallCall call = call_of(submission);
  if (tensors.size() > 1) {
    std::ranges::transform(tensors, group.begin(), [](const auto& tensor) {
      return SmallTensor{tensor.input, tensor.output, tensor.shape};
    });
    call.group = std::span(group).first(tensors.size());
  }
  return start_unowned(call, submission.keep_alive);
}

std::shared_ptr<HandleState> SmallCalls::start_unowned(const SmallCall& call,
                                                       const std::shared_ptr<void>& owner) {
  const LibraryCall inside;
  if (call.deadline != kNoDeadline) return nullptr;
  std::shared_ptr<HandleState> pending;
  Work work = Work::None;
  {
    const EngineLock lock(mutex_);
    if (!may_start()) return nullptr;
    const bool in_burst = burst_.fast() > 0;
    pending = fast_path_.start_unowned(call, owner);
    if (pending) work = work_left(in_burst);
  }
  if (work != Work::None) loop_.drive_or_call(work == Work::Small);
  return pending;
}

void SmallCalls::finish(RepeatedOp& op, const SmallCall& call) {
  const LibraryCall inside;
  if (!op.pending->done.load(std::memory_order_relaxed)) {
    end_gathered();
    await_round(op.awaited(), *op.pending);
  }
  struct Leaving {
    RepeatedOp& op;
    ~Leaving() { op.in_use.store(false, std::memory_order_release); }
  } const leaving{op};
  loop_.wait_for(*op.pending);
  FastPath::fetch(op, call);
}

/// Gives the others a moment, and ends what can be ended.
void SmallCalls::await_round(const RepeatedOp::Awaited& round, const HandleState& pending) {
  if (round.is_direct) drive_direct(round, pending);
  if (round.is_direct ? !board_.rounds().has_result(round.slot) : !fast_path_.await(round, pending))
    return;
  const EngineLock lock(mutex_);
  end_complete();
}

/// Ends the rounds that all ranks have arrived in. A failure is the world's, and raised where the
/// caller waits: until the operation is over its memory is in use. What comes of a round that is
/// negotiated may need driving by others than the caller.
void SmallCalls::end_complete() {
  try {
    fast_path_.end_complete();
  } catch (...) {
    board_.set_failure(status_of_current_exception());
  }
  if (!runner_.has_queued()) return;
  mutex_.wake_waiters();  // among them a thread of this rank that has the turn and sleeps
  mutex_.wake_worker();
}

void SmallCalls::end_gathered() {
  if (!burst_.has_complete()) return;
  const EngineLock lock(mutex_);
  end_complete();
}

/// Gives the other domains a moment, without the rest of what driving costs.
void SmallCalls::drive_direct(const RepeatedOp::Awaited& round, const HandleState& pending) {
  const auto is_over = [&] {
    return pending.done.load(std::memory_order_acquire) || board_.rounds().has_result(round.slot);
  };
  const bool has_core = parts_.topology.has_core();
  if (!leader_) {
    wait_until(is_over, waits::kDirectRound, has_core);
    return;
  }
  const Turn turn = loop_.try_take();
  if (!turn) return;
  board_.bells().set_leader_looks(true);
  for (Pauses pauses(has_core); !is_over();) {
    try {
      const EngineLock lock(mutex_);
      if (board_.failed() || !leader_->drive_direct(turn) || runner_.has_queued()) break;
    } catch (...) {
      board_.set_failure(status_of_current_exception());  // raised once the operation is over
      break;
    }
    if (is_over() || !pauses.pause(waits::kDirectRound)) break;
  }
  // whoever waits now looks again, as does the coordination thread that finds more to do
  board_.bells().set_leader_looks(false);
}

void SmallCalls::abandon(const std::shared_ptr<RepeatedOp>& op, std::shared_ptr<void> owner) {
  const LibraryCall inside;
  const EngineLock lock(mutex_);
  if (op->pending->done.load()) {
    op->in_use.store(false);
  } else {
    fast_path_.abandon(*op, std::move(owner));
  }
}

/// Returns the round that this is the state of; none if it is negotiated. Ends what has gathered.
std::optional<RepeatedOp::Awaited> SmallCalls::find_round(const HandleState& pending) {
  const EngineLock lock(mutex_);
  if (burst_.has_complete()) end_complete();
  const RepeatedOp* const op = fast_path_.find(pending);
  return op == nullptr ? std::nullopt : std::optional(op->awaited());
}

void SmallCalls::await(const HandleState& pending) {
  if (const auto round = find_round(pending)) await_round(*round, pending);
}

}  // namespace hvd
