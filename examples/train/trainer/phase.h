#pragma once
/// A Phase is a part of a training step that a profile (profile.h) shows under its name: from its making to its end, in the thread that
/// makes it. Phases of a thread nest. Costs a load or two where no profile is recorded; does not fail. examples/bench/overlap.py reads
/// these names.

#include <ATen/record_function.h>

namespace examples {

class Phase {
 public:
  static constexpr const char* kStep = "training step";  ///< from zero_grad() to the end of the optimizer's step
  static constexpr const char* kForward = "forward";     ///< with the loss
  static constexpr const char* kBackward = "backward";
  static constexpr const char* kWait = "wait for gradients";  ///< after backward: communication that nothing hides
  static constexpr const char* kUpdate = "update";            ///< the optimizer's step, of gradients that are reduced

  explicit Phase(const char* name) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(name);
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace examples
