#include "hvd/engine/health/failure_messenger.h"

#include <thread>

#include "hvd/base/log.h"
#include "hvd/engine/leader/leader_task.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr int kLooks = 10;

}  // namespace

void FailureMessenger::tell(const Turn& turn, const Status& status) noexcept {
  if (leader_) {
    const EngineLock lock(mutex_);
    leader_->tell_failure(turn, status);
    return;
  }
  if (!parts_.alarm) return;
  // The leader speaks for its domain; where it is dead, the first of those that live.
  for (int rank = 0; rank < parts_.board->self(); ++rank) {
    bool dead = parts_.board->is_dead(rank);
    for (int look = 0; look < kLooks && !dead; ++look) {  // one that another rank looks at just now seems to live
      std::this_thread::sleep_for(100us);
      dead = parts_.board->is_dead(rank);
    }
    if (!dead) return;
  }
  try {
    const Bytes message = LeaderTree::failure_message(status);
    for (int domain = 0; domain < parts_.topology.domains; ++domain)
      if (domain != parts_.topology.domain) parts_.alarm->send(domain, message);
  } catch (...) {
    log(LogLevel::Warning, "the other hosts could not be told of the failure: {}", status_of_current_exception().text());
  }
}

void FailureMessenger::drain(const Turn& turn) noexcept {
  if (leader_) {
    const EngineLock lock(mutex_);
    leader_->drain(turn);
  } else if (parts_.alarm) {
    try {
      while (parts_.alarm->receive()) continue;  // lets the wire send; nobody writes to a rank that leads nothing
    } catch (...) {
      log(LogLevel::Debug, "after the failure: {}", status_of_current_exception().text());
    }
  }
}

}  // namespace hvd
