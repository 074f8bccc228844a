#include "hvd/negotiation/board/patience.h"

#include <algorithm>
#include <thread>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kLookInterval = 100ms;  // how often the living are counted
constexpr auto kShortSleep = 50us;
constexpr int kShortSleeps = 200;
constexpr auto kSleep = 1ms;
// of time that counts: a process that was stopped itself has not waited meanwhile
constexpr auto kMostAtOnce = 1s;

}  // namespace

std::string Patience::name_of_rank(int index) const {
  if (index == PatientWait::kNobody) return "a rank";
  const auto place = static_cast<std::size_t>(index);
  return formatted("rank {}", place < ranks.size() ? ranks[place] : index);
}

std::string PatientWait::stalled_text(int culprit) const {
  return formatted("{} has kept the others of its host from going on for {} s, {}: {}",
                   patience_.name_of_rank(culprit),
                   std::chrono::duration_cast<std::chrono::seconds>(waited_).count(), how_,
                   kIsStopped);
}

bool PatientWait::pause(int culprit) {
  std::this_thread::sleep_for(++pauses_ <= kShortSleeps ? kShortSleep : kSleep);
  return look_after(culprit);
}

bool PatientWait::look_after(int culprit) {
  if (!board_.failure().ok()) return false;
  const auto now = Clock::now();
  // each has its own time
  const bool is_another = culprit != kNobody && culprit_ != kNobody && culprit != culprit_;
  if (looked_at_ == Clock::time_point()) next_look_ = now + kLookInterval;
  if (looked_at_ == Clock::time_point() || is_another) {
    waited_ = 0ns;
    next_warning_ = patience_.warn_after;
  } else {
    waited_ += std::min<std::chrono::nanoseconds>(now - looked_at_, kMostAtOnce);
  }
  looked_at_ = now;
  if (culprit != kNobody) culprit_ = culprit;
  if (now < next_look_) return true;
  next_look_ = now + kLookInterval;
  if (board_.end_if_one_died()) return false;
  if (patience_.fail_after.count() > 0 && waited_ >= patience_.fail_after) {
    board_.set_failure({Status::Code::StallTimeout, stalled_text(culprit)});
    return false;
  }
  if (patience_.warn_after.count() > 0 && waited_ >= next_warning_) {
    next_warning_ += patience_.warn_after;
    log(LogLevel::Warning, "{}", stalled_text(culprit));
  }
  return true;
}

}  // namespace hvd
