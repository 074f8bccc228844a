#include "hvd/negotiation/negotiation_log.h"

#include <chrono>
#include <stdexcept>
#include <thread>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

void NegotiationLog::read() {
  while (auto record = board_.read_next()) {
    Outcomes outcomes;
    table_.apply(*record, board_.read_position(), outcomes);
    if (!outcomes.empty()) listener_.on_outcomes(outcomes, false);
  }
}

Status NegotiationLog::explained(const Status& failure) noexcept {
  try {
    read();
  } catch (...) {
    log(LogLevel::Debug, "what was said before the failure cannot be read");
  }
  const auto& refusal = table_.first_refusal();
  return refusal ? Status(failure.code(), formatted("{}; before that: {}", failure.text(), refusal->text)) : failure;
}

void NegotiationLog::nudge_readers() {
  board_.ring_all_workers();
  board_.ring_waiters();
  if (const auto dead = board_.find_dead())
    board_.set_failure({Status::Code::RankFailed,
                        formatted("rank {} died, or ended without hvd::shutdown()", domain_ranks_[static_cast<std::size_t>(*dead)])});
  std::this_thread::sleep_for(50us);
}

// The lock is taken and given back in a loop, which the analysis cannot follow.
NegotiationLog::Transaction::Transaction(NegotiationLog& log, std::size_t budget) HVD_NO_THREAD_SAFETY_ANALYSIS : log_(log), left_(budget) {
  while (true) {
    log_.board_.lock();
    try {
      log_.read();
    } catch (...) {
      log_.board_.unlock();
      throw;
    }
    if (log_.board_.has_room(budget)) return;
    log_.board_.unlock();
    if (log_.board_.failed()) throw BackendError("the world has failed");
    log_.nudge_readers();  // somebody has not read for a long time: the log is some thousand records long
  }
}

NegotiationLog::Transaction::~Transaction() { log_.board_.unlock(); }

void NegotiationLog::Transaction::append(const Bytes& record) {
  const std::size_t bytes = bytes_of_record(record.size());
  if (bytes > left_) throw std::logic_error(formatted("the log: a record of {} bytes in a transaction that has {} left", bytes, left_));
  left_ -= bytes;
  Outcomes outcomes;
  log_.table_.apply(record, log_.board_.tail() + bytes, outcomes);
  for (const auto id : outcomes.closed) log_.board_.close_slot(id);
  log_.board_.append(record);
  log_.listener_.on_outcomes(outcomes, true);
}

}  // namespace hvd
