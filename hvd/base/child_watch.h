#pragma once
/// ChildWatch knows which children that were forked from this process still live, for memory that a
/// child goes on seeing after the fork (a shared mapping): what was in use at a fork must keep its
/// content until that child has ended or runs another program. Any thread; one object for the
/// process, never destroyed. A fork costs a pipe where something is watched at that moment, and
/// nothing else. Where the system refuses the pipe, the child counts as one that lives for ever.
/// Children that are made without the handlers of fork() (vfork, posix_spawn, system) are not seen;
/// they do not use the memory. Nor is a fork() in a signal handler that has interrupted the
/// library.

#include <cstdint>
#include <mutex>
#include <vector>

#include "hvd/base/visible.h"

namespace hvd {

class HVD_BETWEEN_LIBRARIES ChildWatch {
 public:
  static ChildWatch& instance();

  /// Says that from now on there is one thing more that children would see, and returns the number
  /// of the last fork before.
  std::uint64_t begin();
  /// Says that it is not in use any more, and returns the number of the last fork: children of
  /// those since `begin` may still see it.
  std::uint64_t end();
  /// Returns whether no child of the forks `after` + 1 to `last` lives any more.
  bool are_gone(std::uint64_t after, std::uint64_t last);

 private:
  struct Child {
    std::uint64_t fork;
    int alive;  // the reading end of a pipe whose other end the child has; -1: never known
  };
  ChildWatch() = default;
  void before_fork();
  void after_fork(bool in_child);
  void forget_ended();

  std::mutex mutex_;
  std::uint64_t things_ = 0, forks_ = 0;
  std::vector<Child> children_;  // in the order of their forks
  int ends_[2] = {-1, -1};       // of the pipe for the child that is being made
};

}  // namespace hvd
