#include "hvd/negotiation/board/negotiation_log.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kReadsWithin = 1s;  // a rank that lives, however busy its user's threads are

}  // namespace

void NegotiationLog::read() {
  while (auto record = board_.log().read_next()) {
    Outcomes outcomes;
    table_.apply(*record, board_.log().read_position(), outcomes);
    if (!outcomes.empty()) listener_.on_outcomes(outcomes, false);
  }
}

void NegotiationLog::ring_readers() {
  board_.bells().ring_all_workers();
  board_.bells().ring_waiters();
}

Status NegotiationLog::explained(const Status& failure) noexcept {
  try {
    read();
  } catch (...) {
    log(LogLevel::Debug, "what was said before the failure cannot be read");
  }
  const auto& refusal = table_.first_refusal();
  if (!refusal || failure.text().find(refusal->text) != std::string::npos) return failure;
  return {failure.code(), formatted("{}; before that: {}", failure.text(), refusal->text)};
}

void NegotiationLog::nudge_readers() {
  ring_readers();
  std::this_thread::sleep_for(50us);
}

bool ReaderWait::nudge() {
  log_.ring_readers();
  return wait_.pause(log_.board_.log().find_slowest().rank);
}

/// A rank that is stopped holds up nobody but those who wait for it, until the log is full. So it
/// is warned of before that.
void NegotiationLog::warn_of_slowest() {
  const auto warn_after = board_.patience().warn_after;
  if (warn_after.count() == 0 || !board_.log().is_unread(BoardLog::kBytes / 2)) return;
  const auto slowest = board_.log().find_slowest();
  const auto now = std::chrono::steady_clock::now();
  if (slowest != behind_.reader)
    behind_ = {slowest, now, now + std::min<std::chrono::nanoseconds>(kReadsWithin, warn_after)};
  if (now < behind_.next_warning) return;
  behind_.next_warning = now + warn_after;
  log(LogLevel::Warning,
      "{} has not read for {} s what the others of its host have said; when their log is full, all "
      "wait for it",
      board_.patience().name_of_rank(slowest.rank),
      std::chrono::duration_cast<std::chrono::seconds>(now - behind_.since).count());
}

// The lock is taken and given back in a loop, which the analysis cannot follow.
NegotiationLog::Transaction::Transaction(NegotiationLog& log,
                                         std::size_t budget) HVD_NO_THREAD_SAFETY_ANALYSIS
    : log_(log),
      left_(budget) {
  log_.warn_of_slowest();
  ReaderWait readers(log_);
  while (true) {
    log_.board_.lock();
    try {
      log_.read();
    } catch (...) {
      log_.board_.unlock();
      throw;
    }
    if (log_.board_.log().has_room(budget)) return;
    log_.board_.unlock();
    // somebody has not read for long: the log is some thousand records long
    if (!readers.nudge()) log_.board_.failure().raise();
  }
}

NegotiationLog::Transaction::~Transaction() { log_.board_.unlock(); }

void NegotiationLog::Transaction::append(const Bytes& record) {
  const std::size_t bytes = bytes_of_record(record.size());
  if (bytes > left_)
    throw std::logic_error(
        formatted("the log: a record of {} bytes in a transaction that has {} left", bytes, left_));
  left_ -= bytes;
  Outcomes outcomes;
  log_.table_.apply(record, log_.board_.log().tail() + bytes, outcomes);
  for (const auto id : outcomes.closed) log_.board_.rounds().close_slot(id);
  log_.board_.log().append(record);
  log_.listener_.on_outcomes(outcomes, true);
}

}  // namespace hvd
