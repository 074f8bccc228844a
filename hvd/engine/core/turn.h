#pragma once
/// A Turn is the right to drive an engine: to launch and advance batches, to call backends and the
/// transport. One thread of a rank has it at a time. Functions that need it ask for a `const
/// Turn&`. Whoever lets go of it hands over: to a thread that waits, or to the coordination thread.
// Tested in tests/hvd/engine/engine_test.cc

#include <utility>

namespace hvd {

class ProgressLoop;

class Turn {
 public:
  /// Nobody's turn.
  Turn() = default;
  Turn(Turn&& other) noexcept : loop_(std::exchange(other.loop_, nullptr)) {}
  Turn& operator=(Turn&& other) noexcept {
    if (this != &other) {
      end();
      loop_ = std::exchange(other.loop_, nullptr);
    }
    return *this;
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { end(); }

  explicit operator bool() const { return loop_ != nullptr; }
  /// Hands over now.
  void end() noexcept;

 private:
  friend class ProgressLoop;
  explicit Turn(ProgressLoop& loop) : loop_(&loop) {}

  ProgressLoop* loop_ = nullptr;
};

}  // namespace hvd
