#pragma once
/// RankProcess is one rank that hvdrun has started: a process group of its own, and the ends of the pipes that its output comes from. It
/// passes that on by whole lines, and remembers the last of what it said to standard error. Not for several threads.

#include <sys/types.h>

#include <array>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>

#include "examples/hvdrun/plan.h"

namespace hvdrun {

struct OutputOptions;

class RankProcess {
 public:
  /// Starts it. Throws std::runtime_error with the system's words.
  RankProcess(const Plan& plan, const std::string& meeting, int rank, const OutputOptions& options);
  /// Kills what is left of it.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] pid_t process() const { return process_; }
  /// Returns the descriptors to wait for, -1 for those that have ended.
  [[nodiscard]] std::array<int, 2> outputs() const { return {streams_[0].pipe, streams_[1].pipe}; }
  /// Passes on what has arrived.
  void pass_output_on();
  /// Returns whether it has ended by now.
  bool has_ended();
  /// To it and all that it has started.
  void send(int signal) const;
  /// Passes on what has no end of line, when no more is waited for.
  void finish_output();
  /// Requires `has_ended()`. Returns its exit code, or 128 and the number of the signal that ended it.
  [[nodiscard]] int exit_code() const;
  /// Returns how it ended, in words.
  [[nodiscard]] std::string describe_end() const;
  [[nodiscard]] const std::deque<std::string>& last_words() const { return last_words_; }

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  struct Stream {
    int pipe = -1;
    std::FILE* to = nullptr;
    std::string prefix;
    std::string partial;  // a line without its end
    std::unique_ptr<std::FILE, CloseFile> copy;
  };
  void read(Stream& stream);
  void say(Stream& stream, const std::string& line, bool is_whole);

  const int rank_;
  pid_t process_ = -1;
  std::array<Stream, 2> streams_;
  std::deque<std::string> last_words_;
  bool has_ended_ = false;
  int status_ = 0;
};

}  // namespace hvdrun
