#pragma once
/// A Rank is a process of the job as hvdrun sees it, and a RankGroup is the ranks of one host: started by hvdrun itself, or by its helper
/// on another host. What looks after a job knows no more of them than this. For one thread.

#include <poll.h>

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace hvdrun {

class Rank {
 public:
  virtual ~Rank() = default;
  /// Returns whether it has ended by now.
  virtual bool has_ended() = 0;
  /// Sends a signal to it and all that it has started.
  virtual void send(int signal) = 0;
  /// Requires `has_ended()`. Returns its exit code, or 128 and the number of the signal that ended it.
  [[nodiscard]] virtual int exit_code() const = 0;
  /// Requires `has_ended()`. Returns how it ended, in words.
  [[nodiscard]] virtual std::string describe_end() const = 0;
  /// Returns the last lines of its standard error.
  [[nodiscard]] virtual const std::deque<std::string>& last_words() const = 0;
};

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  /// Returns the ranks, which the group owns.
  virtual std::vector<Rank*> ranks() = 0;
  /// Adds the descriptors that something may arrive at, or leave by.
  virtual void add_waited(std::vector<pollfd>& waited) const = 0;
  /// Reads a piece of what has arrived, writes a piece of what is to leave: either may come faster than the other goes.
  virtual void pass_on() = 0;
  /// Returns whether all output of the ranks has been read.
  [[nodiscard]] virtual bool has_said_all() const = 0;
  /// Passes on what has no end of line, when no more is waited for.
  virtual void finish_output() = 0;
  /// From now on the ranks are to end: output that nobody takes is no reason to wait.
  virtual void begin_to_end() = 0;
};

/// Takes what a rank says, in whatever pieces. `stream`: 0 is standard output, 1 standard error.
class RankSink {
 public:
  virtual ~RankSink() = default;
  virtual void hear(std::size_t stream, std::string_view bytes) = 0;
  /// Returns whether no more should be read for now.
  [[nodiscard]] virtual bool is_full(std::size_t stream) const = 0;
};

}  // namespace hvdrun
