#pragma once
/// A PatientWait is one wait of this rank for another one of its domain, for what that is to write
/// to their shared memory. It takes nanoseconds, unless that rank has lost its core, is stopped or
/// is dead, and then nobody else may be able to say so: who waits holds locks of its own rank, or
/// of the domain. So whoever waits looks for the dead, counts time, warns, and in the end ends the
/// world. One thread at a time; it never throws.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/errors.h"

namespace hvd {

/// The words of messages for the reason why a rank does not do what takes a moment.
inline constexpr std::string_view kIsStopped =
    "it is stopped (SIGSTOP, a debugger, a frozen container) or gets no processor time";

/// The times for which to wait for another rank in silence.
struct Patience {
  std::vector<int> ranks;                  ///< global ranks of the domain, for messages
  std::chrono::nanoseconds warn_after{0};  ///< again and again; 0: never
  std::chrono::nanoseconds fail_after{0};  ///< 0: never

  /// Returns "rank 7"; "a rank" for kNobody.
  [[nodiscard]] std::string name_of_rank(int index) const;
};

/// The calls of a wait to the board.
struct BoardReports {
  std::function<std::optional<int>()> find_dead;   ///< returns the index of a dead rank, if any
  std::function<bool()> end_if_one_died;           ///< ends the world then; returns whether one has
  std::function<void(const Status&)> set_failure;  ///< ends the world
  std::function<Status()> failure;  ///< returns what has ended the world; ok if nothing has
};

class PatientWait {
 public:
  static constexpr int kNobody = -1;
  /// The words of messages for what a rank keeps the others in.
  static constexpr std::string_view kWrites = "in the middle of a write to their shared memory";
  static constexpr std::string_view kReads = "without having read what they have said";

  /// All three must outlive it.
  PatientWait(const Patience& patience, const BoardReports& board, std::string_view how)
      : patience_(patience), board_(board), how_(how) {}

  /// Sleeps a moment after a look in vain, and looks after the rank that is waited for. `culprit`:
  /// its index, or kNobody where that is not known. Returns false once the world has failed.
  bool pause(int culprit);
  /// The same, for who sleeps otherwise.
  bool look_after(int culprit);

 private:
  using Clock = std::chrono::steady_clock;
  [[nodiscard]] std::string stalled_text(int culprit) const;

  const Patience& patience_;
  const BoardReports& board_;
  const std::string_view how_;
  int culprit_ = kNobody;               // that was known last
  std::chrono::nanoseconds waited_{0};  // for it
  std::chrono::nanoseconds next_warning_{0};
  Clock::time_point looked_at_{};  // last; never before the first pause
  Clock::time_point next_look_{};  // for the dead
  int pauses_ = 0;
};

}  // namespace hvd
