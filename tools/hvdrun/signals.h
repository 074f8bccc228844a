#pragma once
/// Signals are those that hvdrun or its helper hears, as a descriptor to wait for: SIGINT, SIGTERM, SIGHUP and SIGTSTP, but not those that
/// its caller wants ignored, as nohup does; and SIGCHLD, which only wakes. It blocks them in this process, and is for one thread. Throws
/// std::runtime_error with the system's words.

#include <csignal>

namespace hvdrun {

class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Returns the next one that is none of a child's; 0 if there is none.
  [[nodiscard]] int next() const;

 private:
  sigset_t heard_{};
  int descriptor_ = -1;
};

}  // namespace hvdrun
