#include "hvd/engine/engine.h"

#include <algorithm>

#include "hvd/base/futex.h"
#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/departure.h"
#include "hvd/routes.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

// for the turn, which the coordination thread has for moments only
constexpr auto kDesertionPatience = 500ms;
constexpr auto kCallbackPatience = 10s;  // for functions of the program, at shutdown

/// Waits for functions that were given to `then`, unless one of them does.
void await_callbacks(Continuations& continuations, std::chrono::milliseconds patience) {
  if (CallbackThread::is_here() || continuations.wait_until_called(patience) ||
      patience < kCallbackPatience)
    return;
  log(LogLevel::Warning,
      "shutdown() has waited for {} s for functions that were given to Handle::then(), and goes on "
      "without them",
      kCallbackPatience.count());
}

/// Returns whether a batch of it alone would be done at once, so that it gains from company.
bool is_small_on_host(const Submission& submission) {
  std::size_t bytes = 0;
  for (const auto& tensor : submission.tensors)
    bytes += static_cast<std::size_t>(element_count(tensor.shape)) * element_bytes(tensor.dtype);
  return submission.device.kind == DeviceKind::Cpu && routes::is_at_once(bytes);
}

}  // namespace

Engine::Engine(EngineParts parts)
    : parts_(std::move(parts)),
      board_(*parts_.board),
      mutex_(board_),
      queue_(board_.slots()),
      log_(board_, parts_.topology, parts_.world, parts_.process_sets,
           parts_.config.fusion_threshold_bytes, parts_.config.disable_group_fusion, *this),
      factory_(parts_, log_.table()),
      cutter_(parts_, log_, mutex_),
      controller_(parts_, log_, cutter_, mutex_),
      leavers_(parts_, log_, ledger_, queue_),
      fast_path_(parts_, log_, ledger_, queue_, mutex_, burst_, *this),
      runner_(parts_, log_.table(), cutter_, mutex_, *this),
      submitter_(parts_, log_, factory_, controller_, leavers_, ledger_, queue_, mutex_, *this),
      handler_(parts_, log_, cutter_, fast_path_, runner_, submitter_, ledger_, queue_, mutex_,
               *this),
      leader_(parts_.transport ? std::make_unique<LeaderTask>(parts_, log_, controller_, cutter_,
                                                              leavers_, fast_path_)
                               : nullptr),
      messages_(parts_, mutex_),
      messenger_(parts_, leader_.get(), mutex_),
      health_(parts_, log_, controller_, ledger_, queue_, callers_, leader_.get(), messages_,
              mutex_),
      loop_(parts_, mutex_, callers_, burst_, *this),
      small_calls_(parts_, mutex_, burst_, fast_path_, runner_, submitter_, leader_.get(), loop_),
      peer_calls_(parts_, mutex_, submitter_, messages_, loop_),
      callback_patience_(kCallbackPatience) {
  const Config& config = parts_.config;
  board_.set_patience({parts_.topology.domain_ranks,
                       config.stall_check_disable ? 0s : config.stall_check_time,
                       config.stall_shutdown_time});
  loop_.start();
}

Engine::~Engine() {
  loop_.stop(false);
  loop_.join();
}

std::shared_ptr<void> Engine::allocate(const Submission& like, DataType dtype, std::size_t bytes) {
  return factory_.allocate(like, dtype, bytes);
}

// -------------------------------------------------------------------------------------- submitting

std::shared_ptr<HandleState> Engine::submit(Submission submission, After after) {
  const LibraryCall inside;
  if (after == After::Return && is_small_unowned(submission, parts_.topology.domains))
    if (auto pending = small_calls_.start_of(submission)) return pending;
  if (after != After::Wait) return submit_anew(std::move(submission), after);
  // Whoever waits at once will drive. Who need not, because it is done or refused, leaves that to
  // the coordination thread after all.
  struct Ending {
    explicit Ending(Engine& of) : engine(of), driver(of.mutex_) {}
    ~Ending() {
      if (driver.has_left_out() && (!pending || pending->done.load()))
        engine.board_.bells().ring_worker(engine.board_.self());
    }
    Engine& engine;
    EngineMutex::Driver driver;
    std::shared_ptr<HandleState> pending;
  } ending(*this);
  return ending.pending = submit_anew(std::move(submission), after);
}

std::shared_ptr<HandleState> Engine::submit_anew(Submission submission, After after) {
  if (CallbackThread::is_here()) burst_.end();  // it is called as what it has waited for is over
  auto fresh = factory_.make(std::move(submission));
  // a persistent operation has none, as each start has its own
  const auto deadline = fresh->deadline;
  fresh->repeats =
      deadline == Entry::kNever &&
      (after != After::Return || is_small_unowned(fresh->submission, parts_.topology.domains));
  const std::shared_ptr<HandleState> pending = fresh->pending;
  pending->waited_for.store(after == After::Wait, std::memory_order_relaxed);
  const auto tensors = fresh->submission.internal ? 0 : fresh->backends.size();
  Entry* entry = nullptr;
  bool numbered = false;
  {
    EngineLock lock(mutex_);
    submitter_.wait_for_earlier(lock, fresh->key, loop_);
    small_calls_.end_complete();
    fast_path_.adopt_all();
    submitter_.require_open();
    if (fast_path_.is_unseen(fresh->key)) throw duplicate(fresh->key);
    entry = submitter_.admit(std::move(fresh), numbered);
  }
  if (deadline != Entry::kNever) health_.expect(deadline);
  if (entry == nullptr) {
    parts_.stats->add(parts_.stats->tensors_submitted, tensors);
    return pending;
  }
  submitter_.prepare(*entry, numbered);
  const bool is_in_burst = after != After::Wait && burst_.count() > 0;
  const bool gathers = is_in_burst && is_small_on_host(entry->submission);
  bool work = false;
  bool small_work = false;
  bool has_gathered = parts_.transport != nullptr;
  {
    EngineLock lock(mutex_);
    submitter_.note_submission(*entry);
    while (!submitter_.announce(*entry, gathers)) {
      lock.unlock();
      log_.nudge_readers();
      loop_.poll();
      lock.lock();
    }
    work = runner_.has_queued();
    small_work = work && runner_.has_only_small_ones();
    has_gathered = has_gathered || log_.table().agreed().has(Scope::Domain);
  }
  parts_.stats->add(parts_.stats->tensors_submitted, tensors);
  if (after == After::Wait) {  // wait() will drive
    // among them a thread of this rank that has the turn and sleeps
    if (loop_.is_taken()) board_.bells().ring_waiters();
    return pending;
  }
  burst_.add_negotiated();
  if (is_in_burst && has_gathered) loop_.call_for_burst();
  if (work || (parts_.transport && !is_in_burst)) loop_.drive_or_call(small_work);
  return pending;
}

void Engine::enter_init_thread() {
  callers_.add_here();
  const EngineLock lock(mutex_);
  queue_.set_init_thread();
}

void Engine::check(Submission submission) const {
  const LibraryCall inside;
  static_cast<void>(factory_.make(std::move(submission)));
}

std::string Engine::persistent_name(int process_set, OpKind kind) {
  const LibraryCall inside;
  const EngineLock lock(mutex_);
  return queue_.next_persistent_name(process_set, kind);
}

// ---------------------------------------------------------------------------------------- outcomes

void Engine::on_outcomes(Outcomes& outcomes, bool said_here) {
  fast_path_.adopt_all();
  handler_.handle(outcomes, said_here);
  somebody_left_ = somebody_left_ || !outcomes.left.empty();
  if (leader_) leader_->note(outcomes);
  for (const int rank : outcomes.left) messages_.note_left(rank);
}

// ----------------------------------------------------------------------------------------- driving

bool Engine::progress(const Turn& turn) noexcept {
  const EngineMutex::Driver driver(mutex_);
  const bool has_gathered = burst_.begin_to_drive();
  try {
    if (board_.failed()) {
      fail_everything(turn, board_.failure());
      messenger_.drain(turn);
      return false;
    }
    bool progressed = false;
    std::vector<BatchRunner::Prepared> batches;
    {
      const EngineLock lock(mutex_);
      log_.read();
      fast_path_.end_complete();
      fast_path_.adopt_all();
      if (!queue_.empty()) progressed = submitter_.announce_waiting();
      if (has_gathered) cutter_.cut_idle_sets();
      if (std::exchange(somebody_left_, false)) leavers_.doubt_all();
      if (leavers_.lingers() && messages_.is_idle()) leavers_.end_lingering();
      if (log_.table().all_left())
        for (Entry* entry : ledger_.all())
          if (entry->state == EntryState::Waiting && entry->announced)
            finish(*entry,
                   {Status::Code::Shutdown,
                    formatted("{} '{}' was pending when {} was called", name_of(entry->key.kind),
                              display_name(entry->key.name), parts_.end_call())});
      batches = runner_.take_queued();
      if (batches.empty() && log_.table().sets().has_removed()) bury_removed_sets(turn);
    }
    progressed = runner_.run(turn, std::move(batches)) || progressed;
    progressed = drive_messages(turn) || progressed;
    if (leader_) {
      const EngineLock lock(mutex_);
      progressed = leader_->drive(turn) || progressed;
    }
    return progressed;
  } catch (...) {
    const Status failure = status_of_current_exception();
    // A connection may be lost as its other end has heard why the world ends, and this rank not
    // yet: what the others have said of it comes first.
    messenger_.drain(turn);
    board_.set_failure(failure);
    fail_everything(turn, board_.failure());
    return false;
  }
}

bool Engine::drive_messages(const Turn& turn) {
  const bool has_news = messages_.has_news();
  if (!has_news && !parts_.peers) return false;
  EngineLock lock(mutex_);
  const bool any = has_news && messages_.advance(lock);
  const bool looks = messages_.attention().awaits_elsewhere() || messages_.has_unsent(turn);
  return (looks && messages_.exchange(turn)) || any;
}

/// Nothing of them is used by this rank any more.
void Engine::bury_removed_sets(const Turn& turn) {
  controller_.evict_removed();
  log_.bury_removed([&](int process_set) HVD_NO_THREAD_SAFETY_ANALYSIS {
    if (handler_.uses(process_set) || runner_.uses(turn, process_set)) return true;
    cutter_.forget(process_set);
    return false;
  });
}

Polling Engine::polling(const Turn& turn) const {
  const Polling polling = runner_.polling(turn);
  // What comes over a wire rings no doorbell here.
  const bool is_wired = parts_.transport != nullptr || messages_.attention().awaits_elsewhere();
  return polling == Polling::None && is_wired ? Polling::Needed : polling;
}

bool Engine::has_results(const Turn& /*turn*/) {
  const EngineLock lock(mutex_);
  return fast_path_.has_complete();
}

bool Engine::has_more(const Turn& turn) {
  if (runner_.is_running(turn) || messages_.attention().has_work()) return true;
  const EngineLock lock(mutex_);
  return runner_.has_queued() || queue_.has_ready(ledger_) ||
         (leader_ && (!ledger_.empty() || leader_->has_work()));
}

bool Engine::expects_messages(const Turn& turn) {
  const EngineLock lock(mutex_);
  return (leader_ && leader_->expects_messages()) || messages_.attention().awaits_elsewhere() ||
         messages_.has_unsent(turn);
}

void Engine::wait(HandleState& pending) {
  const LibraryCall inside;
  if (!ProgressLoop::may_go_on(pending))
    pending.is_message ? peer_calls_.await(pending) : small_calls_.await(pending);
  loop_.wait_for(pending);
}

bool Engine::poll(HandleState& pending) {
  const LibraryCall inside;
  if (!ProgressLoop::may_go_on(pending)) {
    burst_.end();
    small_calls_.end_gathered();
    loop_.poll();
  }
  if (!ProgressLoop::may_go_on(pending)) {
    pending.polled.store(true, std::memory_order_relaxed);
    return false;
  }
  pending.waited_for.store(true, std::memory_order_relaxed);
  return true;
}

void Engine::then(HandleState& pending, std::function<void()> function) {
  const LibraryCall inside;
  CallbackThread::start();
  {
    const EngineLock lock(mutex_);
    if (!mutex_.continuations().add(pending, std::move(function))) return;
  }
  board_.bells().ring_worker(board_.self());  // which looks after it from now on
}

// -------------------------------------------------------------------------------------------- ends

void Engine::finish(Entry& entry, Status status) {
  if (entry.op != nullptr && !fast_path_.end(entry, !status.ok())) return;
  entry.state = advance(entry.state, status.ok() ? EntryEvent::Finish : EntryEvent::Fail);
  // what never travelled: all of it after a failure, otherwise the tensors that nobody had
  factory_.release(entry);
  if (entry.trace != 0) timeline().finished(entry.trace, status);
  const auto pending = entry.pending;
  if (entry.op != nullptr && status.ok()) {
    entry.op->place = ledger_.take_out(entry);
  } else {
    auto owned = ledger_.remove(entry);
    if (status.ok() && entry.repeats) fast_path_.ops().make(entry);
    if (!status.ok()) fast_path_.ops().drop(UnitKey(entry.key));
    mutex_.continuations().keep(*pending, owned->submission.keep_alive);
    owned->pending.reset();
    if (!fast_path_.is_unseen(owned->key)) ledger_.note_unseen(owned->key, pending);
    mutex_.destroy(std::move(owned));
  }
  pending->status = std::move(status);
  pending->done.store(true, std::memory_order_release);
  mutex_.continuations().post(*pending);
  mutex_.wake_own_threads();
  if (queue_.empty()) return;
  mutex_.wake_waiters();  // whoever drives next has something to announce
  mutex_.wake_worker();
}

void Engine::fail_everything(const Turn& turn, const Status& failure) noexcept {
  if (std::exchange(failure_handled_, true)) return;
  messenger_.tell(turn, failure);  // first: what follows may take long, or never end
  const bool rests = runner_.abort(turn);
  const EngineLock lock(mutex_);
  const Status status = log_.explained(failure);
  if (!rests)
    for (const Entry* entry : ledger_.all())
      if (entry->state == EntryState::InFlight) keep_for_ever(entry->submission.keep_alive);
  static_cast<void>(runner_.take_queued());
  fast_path_.adopt_all();
  for (Entry* entry : ledger_.all())
    // the others' submitters find that all is refused
    if (entry->announced) finish(*entry, status);
  submitter_.refuse_all(status);
  messages_.fail_all(status);
  mutex_.wake_own_threads();
}

void Engine::abort(const Status& why) {
  const LibraryCall inside;
  // without the mutex, whose owner may wait for what this ends
  if (stopped_cleanly_.load()) return;
  board_.set_failure(why.ok()
                         ? departure(parts_.world, formatted("rank {} has", parts_.topology.rank),
                                     "called hvd::shutdown()", "")
                         : why);
}

bool Engine::desert(const Status& why) noexcept {
  if (!leader_) return false;
  Turn turn = loop_.take(Clock::now() + kDesertionPatience);
  if (!turn) return false;
  {
    const EngineLock lock(mutex_);
    leader_->tell_failure(turn, why);
  }
  loop_.keep_forever(std::move(turn));
  return true;
}

void Engine::say_leaving(const std::function<void()>& meanwhile) {
  const auto say = [this] {  // false: it is too early
    const EngineLock lock(mutex_);
    try {
      fast_path_.end_complete();
      fast_path_.adopt_all();
      if (board_.failed()) return true;
      if (!leavers_.leave(!messages_.is_idle())) return false;
      messages_.leave();
    } catch (...) {
      board_.set_failure(status_of_current_exception());
    }
    return true;
  };
  while (!say()) {
    loop_.poll();
    std::this_thread::sleep_for(50us);
    meanwhile();
  }
  board_.bells().ring_waiters();
  board_.bells().ring_all_workers();
}

bool Engine::all_is_over() {
  return log_.table().all_left() && ledger_.empty() && queue_.empty() &&
         !(leader_ && leader_->has_noted());
}

bool Engine::leave(std::chrono::milliseconds patience) {
  const bool has_name = !parts_.world.empty();
  const auto deadline = Clock::now() + patience;
  const auto is_late = [&] { return Clock::now() > deadline; };
  const auto rests = [this]() HVD_REQUIRES(engine_mutex) {
    return ledger_.empty() && queue_.empty() && messages_.is_idle();
  };
  const auto give_up_when_late = [&] {
    if (!has_name || !is_late()) return;
    const EngineLock lock(mutex_);
    // once all have left, each drives on until what is pending has ended
    if (!rests() && !log_.table().have_all_left()) abort();
  };
  {
    const EngineLock lock(mutex_);
    if (submitter_.stop()) return true;
    has_left_ = true;
  }
  say_leaving(give_up_when_late);
  bool is_over = false;
  {
    Turn turn = loop_.take(has_name ? deadline : Clock::time_point::max());
    if (!turn) {  // another thread may wait in vain
      give_up_when_late();
      turn = loop_.take();
    }
    loop_.drive_until(turn, [&] {
      if (failure_handled_) return is_over = true;
      {
        const EngineLock lock(mutex_);
        is_over = all_is_over();
        if (is_over || (is_late() && rests())) return true;
      }
      give_up_when_late();
      return false;
    });
  }
  const auto for_callbacks = has_name
                                 ? std::min<std::chrono::milliseconds>(patience, kCallbackPatience)
                                 : kCallbackPatience;
  if (!is_over) await_callbacks(mutex_.continuations(), for_callbacks);
  const EngineLock lock(mutex_);
  callback_patience_ = is_over ? for_callbacks : 0ms;
  return is_over;
}

bool Engine::shutdown() {
  bool has_left = false;
  std::chrono::milliseconds for_callbacks{};
  {
    const EngineLock lock(mutex_);
    has_left = std::exchange(has_left_, false);
    for_callbacks = callback_patience_;
    if (submitter_.stop() && !has_left) return stopped_cleanly_.load();
  }
  if (!has_left) say_leaving([] {});
  Turn turn = loop_.take();
  loop_.drive_until(turn, [&] {
    if (failure_handled_) return true;
    const EngineLock lock(mutex_);
    return all_is_over();
  });
  {
    const EngineLock lock(mutex_);
    stopped_cleanly_.store(!board_.failed() && log_.table().all_left());
    if (board_.failed() && parts_.world.empty()) warn_of_failure();
    fast_path_.adopt_all();
    const Status over{Status::Code::Shutdown, parts_.end_call() + " has been called"};
    for (Entry* entry : ledger_.all())
      if (entry->announced) finish(*entry, over);
    submitter_.refuse_all(over);
  }
  loop_.stop(stopped_cleanly_.load());
  timeline().stop();
  loop_.keep_forever(std::move(turn));
  if (!parts_.world.empty()) loop_.join();
  await_callbacks(mutex_.continuations(), for_callbacks);
  return stopped_cleanly_.load();
}

/// Warns, at shutdown, of the failure that ended the world. Where others have died because a rank
/// has left, that rank alone says so: the others' words are those of who waited for it.
void Engine::warn_of_failure() {
  const auto& refusal = log_.table().first_refusal();
  if (refusal && refusal->left_rank != parts_.topology.rank) return;
  log(LogLevel::Warning, "shut down after a failure: {}", log_.explained(board_.failure()).text());
}

}  // namespace hvd
