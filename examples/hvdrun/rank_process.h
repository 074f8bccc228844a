#pragma once
/// RankProcess is one rank that hvdrun has started: a process group of its own, and the ends of the pipes that its output comes from. It
/// passes that on by whole lines, and remembers the last of what it said to standard error. Not for several threads.

#include <sys/types.h>

#include <array>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "examples/hvdrun/outlet.h"
#include "examples/hvdrun/plan.h"

namespace hvdrun {

struct OutputOptions;

class RankProcess {
 public:
  /// Starts it. `outlets`, which are borrowed, take its standard output and error. Throws std::runtime_error with the system's words.
  RankProcess(const Plan& plan, const std::string& meeting, int rank, const OutputOptions& options, const std::array<Outlet*, 2>& outlets);
  /// Kills what is left of it. Until then the process and its group keep their numbers, also when it has ended.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] pid_t process() const { return process_; }
  /// Returns the descriptors to wait for, -1 for those that have ended or whose outlet is full.
  [[nodiscard]] std::array<int, 2> outputs() const;
  /// Returns whether all of its output has been read.
  [[nodiscard]] bool has_said_all() const { return streams_[0].pipe < 0 && streams_[1].pipe < 0; }
  /// Passes on a piece of what has arrived: it may write faster than that can be read.
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
    Outlet* to = nullptr;
    std::string prefix;
    std::string partial;  // a line without its end, of some KiB at most
    std::unique_ptr<std::FILE, CloseFile> copy;
  };
  struct End {
    int code = 0, signal = 0;
  };
  void read(Stream& stream);
  void say(Stream& stream, std::string_view line, bool is_whole);

  const int rank_;
  pid_t process_ = -1;
  std::array<Stream, 2> streams_;
  std::deque<std::string> last_words_;
  bool has_ended_ = false;
  End how_;
};

}  // namespace hvdrun
