#pragma once
/// RankProcess is one rank that this process has started: a process group of its own, and the ends of the pipes that its output comes
/// from, which goes to a sink. Not for several threads.

#include <sys/types.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tools/hvdrun/rank.h"

namespace hvdrun {

/// What the ranks of a job run.
struct Program {
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> variables;  ///< for all ranks
  std::vector<std::string> unset;                              ///< variables that the ranks must not see
};

/// How a process ended.
struct End {
  int code = 0, signal = 0;
  [[nodiscard]] int exit_code() const { return signal != 0 ? 128 + signal : code; }
  /// Returns it in words: "ended with exit code 7".
  [[nodiscard]] std::string text() const;
};

class RankProcess {
 public:
  /// What is this rank's own.
  struct Own {
    int rank = 0;
    std::vector<std::pair<std::string, std::string>> variables;
    int input = -1;  ///< its standard input, borrowed; -1: it has none
  };
  /// Starts it. `sink`, which is borrowed, takes its standard output and error; null: they stay where this process' are. Throws
  /// std::runtime_error with the system's words.
  RankProcess(const Program& program, const Own& own, RankSink* sink);
  /// Kills what is left of it. Until then the process and its group keep their numbers, also when it has ended.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  [[nodiscard]] pid_t process() const { return process_; }
  /// Adds the descriptors to wait for: not those that have ended, or whose sink is full.
  void add_waited(std::vector<pollfd>& waited) const;
  /// Returns whether all of its output has been read.
  [[nodiscard]] bool has_said_all() const { return pipes_[0] < 0 && pipes_[1] < 0; }
  /// Passes on a piece of what has arrived: it may write faster than that can be read.
  void pass_output_on();
  /// Returns whether it has ended by now.
  bool has_ended();
  /// To it and all that it has started.
  void send(int signal) const;
  /// Requires `has_ended()`.
  [[nodiscard]] const End& end() const { return how_; }

 private:
  void read(std::size_t stream);

  pid_t process_ = -1;
  RankSink* const sink_;
  std::array<int, 2> pipes_{-1, -1};
  bool has_ended_ = false;
  End how_;
};

}  // namespace hvdrun
