#pragma once
/// A Profile records some training steps: what LibTorch computes on every rank, and hvd's timeline,
/// in one file for Perfetto and chrome://tracing. Collective: all ranks call the same functions at
/// the same steps, in one thread. The clocks of the two are laid on one another by an allreduce
/// that both know. Rank 0 writes the file; it fails by throwing Refused on all ranks.

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace examples {

class Profile {
 public:
  /// Records `steps` steps, after `skip` that warm up. An empty path: nothing.
  Profile(std::string path, std::int64_t skip, std::int64_t steps);

  /// To be called before each step.
  void before_step();
  /// To be called when training ends; writes the file where that has not been done. Returns whether
  /// there is one.
  bool finish();

 private:
  void begin();
  void end();

  std::string path_;
  std::int64_t skip_, steps_;
  std::int64_t done_ = 0;  ///< steps begun
  bool running_ = false, written_ = false;
  std::int64_t marked_ =
      0;  ///< when the common allreduce was over on this rank, in nanoseconds since 1970
};

/// A Phase is a part of a training step that a profile shows under its name: from its making to its
/// end, in the thread that makes it. Phases of a thread nest. Costs a load or two where no profile
/// is recorded; does not fail. tests/bench/overlap.py reads these names.
class Phase {
 public:
  static constexpr const char* kStep =
      "training step";  ///< from zero_grad() to the end of the optimizer's step
  static constexpr const char* kForward = "forward";  ///< with the loss
  static constexpr const char* kBackward = "backward";
  static constexpr const char* kWait =
      "wait for gradients";  ///< after backward: communication that nothing hides
  static constexpr const char* kUpdate =
      "update";  ///< the optimizer's step, of gradients that are reduced

  explicit Phase(const char* name) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(name);
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace examples
