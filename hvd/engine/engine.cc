#include "hvd/engine/engine.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/engine/library_call.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kDesertionPatience = 500ms;  // for the turn, which the coordination thread has for moments only

bool may_go_on(const HandleState& pending) {
  return pending.done.load(std::memory_order_acquire) || pending.enqueued.load(std::memory_order_acquire);
}

std::string joined_text(const UnitKey& key, int rank) {
  return formatted("{} '{}': rank {} has joined process set {}: it can submit again when all its ranks have", name_of(key.kind),
                   display_name(key.name), rank, key.process_set);
}

std::string removed_text(const UnitKey& key) {
  return formatted("{} '{}': process set {} was removed", name_of(key.kind), display_name(key.name), key.process_set);
}

/// The verdict is made from what travels, where members of a group are numbers; this rank knows their names.
Status with_names_of_members(const Status& status, const Submission& submission) {
  std::string text = status.text();
  for (std::size_t i = 0; i < submission.tensors.size(); ++i) {
    const std::string number = formatted("tensor {} is ", i);
    const std::string& name = submission.tensors[i].name;
    if (name.empty()) continue;
    for (auto at = text.find(number); at != std::string::npos; at = text.find(number, at + number.size() + name.size()))
      text.replace(at, number.size(), formatted("tensor '{}' is ", name));
  }
  return {status.code(), std::move(text)};
}

/// Notes how many rows come from each rank, which follows from what the ranks have said.
void note_rows(Entry& entry, const Unit& unit, std::size_t self) {
  if (unit.key.kind != OpKind::Allgather && unit.key.kind != OpKind::Alltoall) return;
  for (std::size_t i = 0; i < entry.submission.tensors.size(); ++i) {
    auto& rows = entry.rows.emplace_back();
    auto& before = entry.before.emplace_back();
    for (const auto& signature : unit.signatures) {
      const TensorSignature& tensor = signature->tensors[i];
      if (unit.key.kind == OpKind::Allgather) {
        rows.push_back(tensor.shape.front());
      } else {
        rows.push_back(tensor.splits.at(self));
        before.push_back(
            std::accumulate(tensor.splits.begin(), tensor.splits.begin() + static_cast<std::ptrdiff_t>(self), std::int64_t{0}));
      }
    }
  }
  entry.pending->rows = entry.rows;
}

}  // namespace

Engine::Engine(EngineParts parts)
    : parts_(std::move(parts)),
      board_(*parts_.board),
      mutex_(board_),
      queue_(board_.slots()),
      log_(board_, parts_.topology, parts_.process_sets, parts_.config.fusion_threshold_bytes, parts_.config.disable_group_fusion, *this),
      factory_(parts_, log_.table()),
      cutter_(parts_, log_, mutex_),
      controller_(parts_, log_, cutter_, mutex_),
      leavers_(parts_, log_, ledger_, queue_),
      fast_path_(parts_, log_, controller_, ledger_, queue_, mutex_, *this),
      runner_(parts_, log_.table(), cutter_, mutex_, *this),
      leader_(parts_.transport ? std::make_unique<LeaderTask>(parts_, log_, controller_, cutter_, leavers_) : nullptr),
      health_(parts_, log_, controller_, ledger_, queue_, leader_.get(), mutex_),
      loop_(parts_, mutex_, *this) {
  loop_.start();
}

Engine::~Engine() {
  loop_.stop(false);
  loop_.join();
}

std::size_t Engine::drop_persistent_for_test() {
  const EngineLock lock(mutex_);
  return fast_path_.drop_all();
}

std::shared_ptr<void> Engine::allocate(const Submission& like, DataType dtype, std::size_t bytes) {
  return factory_.allocate(like, dtype, bytes);
}

// ------------------------------------------------------------------------------------------------------------------ submitting

std::shared_ptr<HandleState> Engine::submit(Submission submission, After after) {
  const LibraryCall inside;
  auto fresh = factory_.make(std::move(submission));
  fresh->repeats = after == After::Wait;
  const std::shared_ptr<HandleState> pending = fresh->pending;
  const auto tensors = fresh->backends.size();
  Entry* entry = nullptr;
  bool numbered = false;
  {
    EngineLock lock(mutex_);
    wait_for_earlier(lock, fresh->key);
    entry = admit(std::move(fresh), numbered);
  }
  if (entry == nullptr) {
    parts_.stats->add(parts_.stats->tensors_submitted, tensors);
    return pending;
  }
  prepare(*entry, numbered);
  bool work = false;
  bool small_work = false;
  {
    EngineLock lock(mutex_);
    note_submission(*entry);
    while (!announce(*entry)) {
      lock.unlock();
      log_.nudge_readers();
      loop_.poll();
      lock.lock();
    }
    work = runner_.has_queued();
    small_work = work && runner_.has_only_small_ones();
  }
  parts_.stats->add(parts_.stats->tensors_submitted, tensors);
  if (after == After::Wait && !loop_.is_taken()) return pending;  // wait() will drive
  if (small_work) {
    if (const Turn turn = loop_.try_take()) {
      progress(turn);
      return pending;
    }
  }
  if (work || parts_.transport) {
    board_.ring_waiters();  // among them a thread of this rank that has the turn and sleeps
    board_.ring_worker(board_.self());
  }
  return pending;
}

/// What was submitted before a join takes part in it.
void Engine::wait_for_earlier(EngineLock& lock, const UnitKey& key) HVD_NO_THREAD_SAFETY_ANALYSIS {
  while (key.kind == OpKind::Join && queue_.contains_set(key.process_set) && over_.ok() && !board_.failed()) {
    lock.unlock();
    loop_.poll();
    std::this_thread::sleep_for(50us);
    lock.lock();
  }
}

Entry* Engine::admit(std::unique_ptr<Entry> fresh, bool& numbered) {
  if (over_.ok() && board_.failed()) board_.failure().raise();
  over_.raise();
  if (stopping_) throw Shutdown("hvd::shutdown() has been called");
  UnitKey& key = fresh->key;
  const auto& joined = log_.table().joined(key.process_set);
  const bool excluded = std::binary_search(joined.begin(), joined.end(), parts_.topology.rank) ||
                        ledger_.find({key.process_set, OpKind::Join, std::string(kJoin)}) != nullptr;
  if (excluded && key.kind != OpKind::Join) throw Joined(joined_text(key, parts_.topology.rank));
  numbered = key.name.empty();
  if (numbered) {
    std::array<char, kUnnamedText> text{};
    key.name = queue_.next_name(key.process_set, key.kind, text);
    queue_.use_name(key.process_set, key.kind);
  }
  const Entry* const before = ledger_.find(key);
  const bool others_wait = queue_.contains(key);
  // Who waits for a stream only comes back before the device is done: no mistake of theirs.
  const bool comes_back = fresh->submission.on_stream && before != nullptr && before->pending->enqueued.load() && !others_wait;
  if (others_wait && !numbered) throw duplicate(key);
  if (!comes_back && !(numbered && (before != nullptr || others_wait))) return &ledger_.admit(std::move(fresh));
  try {
    factory_.prepare(*fresh);  // under the mutex, which keeps the order of the submissions
  } catch (...) {
    factory_.release(*fresh);
    if (numbered) queue_.take_back_name(key.process_set, key.kind, key.name);
    throw;
  }
  queue_.push(std::move(fresh));
  return nullptr;
}

void Engine::prepare(Entry& entry, bool numbered) {
  try {
    factory_.prepare(entry);  // copies into shared memory: not under the mutex
  } catch (...) {
    const EngineLock lock(mutex_);
    factory_.release(entry);
    const auto failed = ledger_.remove(entry);
    if (numbered) queue_.take_back_name(failed->key.process_set, failed->key.kind, failed->key.name);
    throw;
  }
}

void Engine::note_submission(Entry& entry) {
  if (!timeline().on()) return;
  entry.trace = timeline().submitted(entry.submission, display_name(entry.key.name), is_unnamed(entry.key.name),
                                     entry.since.time_since_epoch().count(), entry.copied);
}

bool Engine::announce(Entry& entry) {
  if (!over_.ok()) {
    finish(entry, over_);
    return true;
  }
  // From its announcement on the entry is everybody's: reading the log may finish it.
  bool announced = false;
  try {
    std::uint32_t ranks = 0;
    switch (controller_.announce(entry, ledger_, ranks)) {
      case Controller::Announced::NoRoom:
        return false;
      case Controller::Announced::Joined:
        finish(entry, {Status::Code::Joined, joined_text(entry.key, parts_.topology.rank)});
        return true;
      case Controller::Announced::SetRemoved:
        finish(entry, {Status::Code::InvalidArgument, removed_text(entry.key)});
        return true;
      case Controller::Announced::Yes:
        announced = true;
        arrived(entry, ranks);
    }
  } catch (...) {
    // Records that cannot be read, or a bug: the ranks' tables may differ from here on, so the world ends for all.
    board_.set_failure(status_of_current_exception());
    if (!announced) finish(entry, board_.failure());
  }
  return true;
}

void Engine::arrived(Entry& entry, std::uint32_t arrived) {
  const UnitRef unit = entry.unit;
  controller_.agree_if_complete(entry.key, unit.id, arrived);
  if (log_.table().any_left()) leavers_.doubt(unit);
}

bool Engine::announce_waiting() {
  bool announced = false;
  while (auto waiting = queue_.pop_ready(ledger_)) {
    Entry& entry = ledger_.admit(std::move(waiting));
    if (entry.trace == 0) note_submission(entry);
    if (!announce(entry)) {  // no room just now
      queue_.put_back(ledger_.remove(entry));
      mutex_.wake_all_workers();
      return announced;
    }
    announced = true;
  }
  return announced;
}

bool Engine::try_fast_path(const SmallCall& call) {
  const LibraryCall inside;
  std::shared_ptr<PersistentOp> op;
  {
    const EngineLock lock(mutex_);
    // What cannot be done so, submit() knows what to say of.
    if (!over_.ok() || stopping_ || board_.failed() || timeline().on()) return false;
    op = fast_path_.start(call);
  }
  if (!op) return false;
  if (!op->pending->done.load(std::memory_order_relaxed)) {
    fast_path_.await(*op);
    if (board_.has_result(op->unit.id)) {
      const EngineLock lock(mutex_);
      fast_path_.take_results();
    }
  }
  struct Leaving {
    PersistentOp& op;
    ~Leaving() { op.in_use.store(false); }
  } const leaving{*op};
  wait(*op->pending);
  return true;
}

// -------------------------------------------------------------------------------------------------------------------- outcomes

void Engine::on_outcomes(Outcomes& outcomes, bool said_here) {
  if (said_here) wake_for(outcomes);
  for (const auto& agreed : outcomes.agreed) act_on_agreement(agreed);
  for (auto& batch : outcomes.batches) {
    const bool takes_part = log_.table().process_set(batch.plan.process_set).rank >= 0 &&
                            !std::binary_search(batch.plan.absent.begin(), batch.plan.absent.end(), parts_.topology.rank);
    if (takes_part) runner_.enqueue(std::move(batch), ledger_);
  }
  somebody_left_ = somebody_left_ || !outcomes.left.empty();
  for (const auto& voided : outcomes.voided)
    for (const auto& unit : voided.units)
      if (Entry* entry = ledger_.find(unit); entry != nullptr && entry->announced && entry->state == EntryState::Waiting)
        finish(*entry, voided.status);
  for (const auto& agreed : outcomes.agreed) {
    const UnitKey& key = log_.table().unit(agreed.id).key;
    if (key.kind == OpKind::Control && key.name == kRemoveProcessSet && agreed.verdict.ok()) cutter_.forget(agreed.what.last);
  }
  if (leader_) leader_->note(outcomes);
}

void Engine::wake_for(const Outcomes& outcomes) {
  bool wake_waiters = !outcomes.left.empty() || !outcomes.voided.empty();
  for (const auto& agreed : outcomes.agreed) {  // those that no batch will follow
    const auto& present = agreed.what.present;
    wake_waiters = wake_waiters || !agreed.verdict.ok() || std::find(present.begin(), present.end(), true) == present.end();
  }
  bool wake_workers = false;
  // Small batches need no help: whoever cut them runs them at once and rings when they are over. Others wake who waits for a
  // result anyway; threads that would take a core from the user's computation only where there are cores to spare, or where the
  // batch cannot be done without them.
  for (const auto& cut : outcomes.batches) {
    const auto& set = log_.table().process_set(cut.plan.process_set);
    const auto traits = traits_of(*cut.plan.signature, cut.plan.dtype, {cut.plan.signature->device, 0}, set);
    const Backend* const backend = parts_.backend_for(traits);
    const bool alone = backend != nullptr && backend->any_rank_finishes(traits, cut.plan.bytes);
    if (alone && cut.plan.bytes <= kSmallBatchBytes) continue;
    wake_waiters = true;
    wake_workers = wake_workers || !alone || parts_.has_spare_cores();
  }
  if (wake_waiters) mutex_.wake_waiters();
  if (wake_workers) mutex_.wake_all_workers();
}

void Engine::act_on_agreement(const Outcomes::Agreed& agreed) {
  const Unit& unit = log_.table().unit(agreed.id);
  const auto& set = log_.table().process_set(unit.key.process_set);
  const Agreement& what = agreed.what;
  if (set.rank < 0 || std::binary_search(what.absent.begin(), what.absent.end(), parts_.topology.rank)) return;
  Entry* const entry = ledger_.find(unit.ref());
  if (entry == nullptr) throw BackendError(formatted("'{}' was agreed, but this rank has not submitted it", unit.key.name));
  parts_.stats->add(parts_.stats->negotiation_rounds, 1);
  if (!agreed.verdict.ok()) return finish(*entry, with_names_of_members(agreed.verdict, entry->submission));
  entry->state = advance(entry->state, EntryEvent::Agree);
  entry->agreed_at = Clock::now();
  entry->pending->present_anywhere = what.present;
  entry->pending->value = what.last;
  entry->unfinished = static_cast<std::size_t>(std::count(what.present.begin(), what.present.end(), true));
  if (entry->submission.tensors.empty()) entry->unfinished = 0;
  entry->unqueued = entry->unfinished;
  note_rows(*entry, unit, static_cast<std::size_t>(set.rank));
  if (unit.key.kind == OpKind::Join) queue_.start_again(unit.key.process_set);
  if (entry->trace != 0) timeline().agreed(entry->trace, unit.key.kind == OpKind::Control ? -1 : what.last, entry->unfinished > 0);
  const bool removed = unit.key.kind == OpKind::Control && !log_.table().has_process_set(what.last);
  if (entry->unfinished == 0) finish(*entry, {});
  if (!removed) return;
  for (Entry* other : ledger_.all())
    if (other->key.process_set == what.last && other->announced && other->state == EntryState::Waiting)
      finish(*other, {Status::Code::InvalidArgument, removed_text(other->key)});
}

// --------------------------------------------------------------------------------------------------------------------- driving

bool Engine::progress(const Turn& turn) noexcept {
  try {
    if (board_.failed()) {
      fail_everything(turn, board_.failure());
      return false;
    }
    bool progressed = false;
    std::vector<BatchRunner::Prepared> batches;
    {
      const EngineLock lock(mutex_);
      log_.read();
      fast_path_.take_results();
      if (!queue_.empty()) progressed = announce_waiting();
      if (std::exchange(somebody_left_, false)) leavers_.doubt_all();
      if (log_.table().all_left())
        for (Entry* entry : ledger_.all())
          if (entry->state == EntryState::Waiting && entry->announced)
            finish(*entry, {Status::Code::Shutdown, formatted("{} '{}' was pending when hvd::shutdown() was called",
                                                              name_of(entry->key.kind), display_name(entry->key.name))});
      batches = runner_.take_queued();
    }
    progressed = runner_.run(turn, std::move(batches)) || progressed;
    if (leader_) {
      const EngineLock lock(mutex_);
      progressed = leader_->drive(turn) || progressed;
    }
    return progressed;
  } catch (...) {
    board_.set_failure(status_of_current_exception());
    fail_everything(turn, board_.failure());
    return false;
  }
}

bool Engine::polls(const Turn& turn) const {
  // What comes over a wire or from a device rings no doorbell here.
  return parts_.transport != nullptr || runner_.polls(turn);
}

bool Engine::has_more(const Turn& turn) {
  if (runner_.is_running(turn)) return true;
  const EngineLock lock(mutex_);
  return runner_.has_queued() || queue_.has_ready(ledger_) || (leader_ && (!ledger_.empty() || leader_->is_busy()));
}

void Engine::wait(HandleState& pending) {
  const LibraryCall inside;
  pending.waited_for.store(true, std::memory_order_relaxed);
  loop_.wait_until([&] { return may_go_on(pending); });
  if (pending.done.load(std::memory_order_acquire)) pending.status.raise();
}

bool Engine::poll(const HandleState& pending) {
  const LibraryCall inside;
  if (may_go_on(pending)) return true;
  loop_.poll();
  return may_go_on(pending);
}

// ------------------------------------------------------------------------------------------------------------------------ ends

void Engine::finish(Entry& entry, Status status) {
  if (entry.op != nullptr && !fast_path_.end(entry, !status.ok())) return;
  entry.state = advance(entry.state, status.ok() ? EntryEvent::Finish : EntryEvent::Fail);
  factory_.release(entry);  // what never travelled: all of it after a failure, otherwise the tensors that nobody had
  if (entry.trace != 0) timeline().finished(entry.trace, status);
  const auto pending = entry.pending;
  if (entry.op != nullptr && status.ok()) {
    entry.op->place = ledger_.take_out(entry);
  } else {
    auto owned = ledger_.remove(entry);
    if (status.ok() && entry.repeats) fast_path_.make(entry);
    if (!status.ok()) fast_path_.drop(UnitKey(entry.key));
    mutex_.destroy(std::move(owned));
  }
  pending->status = std::move(status);
  pending->done.store(true, std::memory_order_release);
  mutex_.wake_own_threads();
  if (queue_.empty()) return;
  mutex_.wake_waiters();  // whoever drives next has something to announce
  mutex_.wake_worker();
}

void Engine::fail_waiting(const Status& status) {
  for (auto& entry : queue_.take_all()) {
    factory_.release(*entry);
    entry->pending->status = status;
    entry->pending->done.store(true, std::memory_order_release);
    mutex_.destroy(std::move(entry));
  }
}

void Engine::fail_everything(const Turn& turn, const Status& status) noexcept {
  if (std::exchange(failure_handled_, true)) return;
  runner_.abort(turn);
  const EngineLock lock(mutex_);
  over_ = status;
  static_cast<void>(runner_.take_queued());
  for (Entry* entry : ledger_.all())
    if (entry->announced) finish(*entry, status);  // the others' submitters find `over_` set
  fail_waiting(status);
  if (leader_) leader_->tell_failure(turn, status);
  mutex_.wake_own_threads();
}

bool Engine::desert(const Status& why) noexcept {
  if (!leader_) return false;
  const auto deadline = Clock::now() + kDesertionPatience;
  Turn turn = loop_.try_take();
  while (!turn) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(50us);
    turn = loop_.try_take();
  }
  {
    const EngineLock lock(mutex_);
    leader_->tell_failure(turn, why);
  }
  loop_.keep_forever(std::move(turn));
  return true;
}

bool Engine::shutdown(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  {
    const EngineLock lock(mutex_);
    if (std::exchange(stopping_, true)) return stopped_cleanly_.load();
    if (!board_.failed()) {
      try {
        leavers_.leave();
      } catch (...) {
        board_.set_failure(status_of_current_exception());
      }
    }
  }
  board_.ring_waiters();
  board_.ring_all_workers();
  Turn turn = loop_.take();
  loop_.drive_until(turn, [&] {
    if (failure_handled_ || Clock::now() > deadline) return true;
    const EngineLock lock(mutex_);
    return log_.table().all_left() && ledger_.empty() && queue_.empty() && !(leader_ && leader_->has_noted());
  });
  {
    const EngineLock lock(mutex_);
    stopped_cleanly_.store(!board_.failed() && log_.table().all_left());
    if (board_.failed()) log(LogLevel::Warning, "shut down after a failure: {}", board_.failure().text());
    if (over_.ok()) over_ = {Status::Code::Shutdown, "hvd::shutdown() has been called"};
    for (Entry* entry : ledger_.all())
      if (entry->announced) finish(*entry, over_);
    fail_waiting(over_);
  }
  loop_.stop(stopped_cleanly_.load());
  timeline().stop();
  loop_.keep_forever(std::move(turn));
  return stopped_cleanly_.load();
}

}  // namespace hvd
