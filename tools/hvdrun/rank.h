#pragma once
/// A Rank is one process of the job: a process group of its own, and the ends of the pipes that its
/// output comes from. For one thread.

#include <poll.h>
#include <sys/types.h>

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "tools/hvdrun/job.h"
#include "tools/hvdrun/options.h"
#include "tools/hvdrun/output.h"

namespace hvdrun {

class Rank {
 public:
  /// Starts it. `meeting_place`: HVD_INIT of the job. `outlets`, which are borrowed, take its
  /// standard output and error. Throws std::runtime_error with the system's words.
  Rank(int number, const Plan& plan, const std::string& meeting_place, const Options& options,
       const std::array<Outlet*, 2>& outlets);
  /// Kills what is left of it. Until then the process and its group keep their numbers, also when
  /// it has ended.
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// Adds the descriptors to wait for: not those that have ended, or whose outlet is full.
  void add_waited(std::vector<pollfd>& waited) const;
  /// Passes on a piece of what has arrived: it may write faster than that can be read.
  void pass_output_on();
  /// Returns whether all of its output has been read.
  [[nodiscard]] bool has_said_all() const { return pipes_[0] < 0 && pipes_[1] < 0; }
  /// Passes on what has no end of line, when no more is waited for.
  void finish_output() { lines_.finish(); }
  /// Returns whether it has ended by now.
  bool has_ended();
  /// Sends a signal to it and all that it has started.
  void send(int signal) const;
  /// Requires `has_ended()`. Returns its exit code, or 128 and the signal that ended it.
  [[nodiscard]] int exit_code() const { return signal_ != 0 ? 128 + signal_ : code_; }
  /// Requires `has_ended()`. Returns how it ended, in words: "rank 1 (process 4711) ended with exit
  /// code 7".
  [[nodiscard]] std::string describe_end() const;
  /// Returns the last lines of its standard error.
  [[nodiscard]] const std::deque<std::string>& last_words() const { return lines_.last_words(); }

 private:
  void read(std::size_t stream);

  const int number_;
  RankLines lines_;
  pid_t process_ = -1;
  std::array<int, 2> pipes_{-1, -1};
  bool has_ended_ = false;
  int code_ = 0, signal_ = 0;  // how it ended
};

}  // namespace hvdrun
