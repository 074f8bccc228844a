#include "hvd/engine/progress/submitter.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/departure.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

Status never_joined(const std::string& world, const UnitKey& key, int leaver) {
  return departure(world,
                   formatted("{} '{}': this rank has joined process set {}, whose rank {} has",
                             name_of(key.kind), display_name(key.name), key.process_set, leaver),
                   "ended, or called hvd::shutdown(),",
                   " without joining: nothing can be submitted in it any more");
}

std::string joined_text(const UnitKey& key, int rank) {
  return formatted(
      "{} '{}': rank {} has joined process set {}: it can submit again when all its ranks have",
      name_of(key.kind), display_name(key.name), rank, key.process_set);
}

}  // namespace

std::string removed_text(const UnitKey& key) {
  return formatted("{} '{}': process set {} was removed", name_of(key.kind), display_name(key.name),
                   key.process_set);
}

void Submitter::wait_for_earlier(EngineLock& lock, const UnitKey& key,
                                 ProgressLoop& loop) HVD_NO_THREAD_SAFETY_ANALYSIS {
  while (key.kind == OpKind::Join && queue_.contains_set(key.process_set) && over_.ok() &&
         !board_.failed()) {
    lock.unlock();
    loop.poll();
    std::this_thread::sleep_for(50us);
    lock.lock();
  }
}

void Submitter::require_open() {
  if (over_.ok() && board_.failed()) log_.explained(board_.failure()).raise();
  over_.raise();
  if (stopping_) throw Shutdown(parts_.end_call() + " has been called");
}

Entry* Submitter::admit(std::unique_ptr<Entry>&& fresh, bool& numbered) {
  require_open();
  UnitKey& key = fresh->key;
  if (!log_.table().sets().has(key.process_set)) throw InvalidArgument(removed_text(key));
  const auto& joined = log_.table().sets().joined(key.process_set);
  const UnitKey join{key.process_set, OpKind::Join, std::string(kJoin)};
  const bool joins = ledger_.find(join) != nullptr;
  const bool has_joined = std::binary_search(joined.begin(), joined.end(), parts_.topology.rank);
  if (joins || (has_joined && key.kind != OpKind::Join)) {
    const auto leavers = log_.table().leavers_of(join);
    if (!joins && !leavers.empty()) never_joined(parts_.world, key, leavers.front()).raise();
    throw Joined(joined_text(key, parts_.topology.rank));
  }
  fresh->unnamed = queue_.name(key);
  numbered = fresh->unnamed.has_value();
  const Entry* const before = ledger_.find(key);
  const bool others_wait = queue_.contains(key);
  // Who waits for a stream only returns before the device is done: no mistake of theirs.
  const bool comes_back = fresh->submission.on_stream && before != nullptr &&
                          before->pending->enqueued.load() && before->pending->waited_for.load() &&
                          !others_wait;
  if ((others_wait || ledger_.is_unseen(key)) && !numbered) throw duplicate(key);
  if (!comes_back && !(numbered && (before != nullptr || others_wait)))
    return &ledger_.admit(std::move(fresh));
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

void Submitter::prepare(Entry& entry, bool numbered) {
  try {
    factory_.prepare(entry);  // copies into shared memory: not under the mutex
  } catch (...) {
    const EngineLock lock(mutex_);
    factory_.release(entry);
    if (numbered) queue_.take_back_name(entry.key.process_set, entry.key.kind, entry.key.name);
    mutex_.destroy(ledger_.remove(entry));
    throw;
  }
}

void Submitter::note_submission(Entry& entry) {
  if (!parts_.timeline->on()) return;
  entry.trace = parts_.timeline->submitted(entry.submission, display_name(entry.key.name),
                                           is_unnamed(entry.key.name),
                                           entry.since.time_since_epoch().count(), entry.copied);
}

bool Submitter::announce(Entry& entry, bool gathers) {
  if (!over_.ok()) {
    engine_.finish(entry, over_);
    return true;
  }
  // From its announcement on the entry is everybody's: reading the log may finish it.
  bool announced = false;
  try {
    std::uint32_t ranks = 0;
    switch (controller_.announce(entry, ledger_, ranks)) {
      case Controller::Announced::NoRoom: return false;
      case Controller::Announced::Joined:
        engine_.finish(entry, {Status::Code::Joined, joined_text(entry.key, parts_.topology.rank)});
        return true;
      case Controller::Announced::SetRemoved:
        engine_.finish(entry, {Status::Code::InvalidArgument, removed_text(entry.key)});
        return true;
      case Controller::Announced::Yes: announced = true; arrived(entry, ranks, gathers);
    }
  } catch (...) {
    // Records that cannot be read, or a bug: the ranks' tables may differ from here on, so the
    // world ends for all.
    board_.set_failure(status_of_current_exception());
    if (!announced) engine_.finish(entry, board_.failure());
  }
  return true;
}

void Submitter::arrived(const Entry& entry, std::uint32_t arrived, bool gathers) {
  const UnitRef unit = entry.unit;
  controller_.agree_if_complete(entry.key, unit.id, arrived, !gathers);
  if (log_.table().any_left()) leavers_.doubt(unit);
}

bool Submitter::announce_waiting() {
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

void Submitter::fail(std::deque<std::unique_ptr<Entry>> waiting, const Status& status) {
  for (auto& entry : waiting) {
    factory_.release(*entry);
    mutex_.continuations().keep(*entry->pending, entry->submission.keep_alive);
    entry->pending->status = status;
    entry->pending->done.store(true, std::memory_order_release);
    mutex_.continuations().post(*entry->pending);
    mutex_.destroy(std::move(entry));
  }
}

void Submitter::refuse_all(const Status& status) {
  if (over_.ok()) over_ = status;
  fail(queue_.take_all(), over_);
}

}  // namespace hvd
