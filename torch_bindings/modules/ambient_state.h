#pragma once
/// What a function's result depends on beside its inputs: the random numbers' generators (of the CPU, and of GPUs that are in use) and
/// autocast, as they were when this was made; to be brought back for a scope.
/// Thread: any; generators are the process's, autocast is the thread's. Owns copies of the states. Throws what LibTorch's generators do.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <utility>
#include <vector>

#include "torch_bindings/precision/autocast.h"

namespace hvd::detail {

class AmbientState {
 public:
  AmbientState();
  /// Forgets the generators that have given no number since.
  void keep_what_was_used();

  /// While it lives, all is as it was when `state` was made; afterwards as before.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const AmbientState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    std::vector<std::unique_ptr<AutocastGuard>> autocast_;
    const bool cached_;
  };

 private:
  struct Autocast {
    c10::DeviceType device;
    c10::ScalarType type;
  };
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<Autocast> autocast_;  ///< where it is on
  bool cached_;                     ///< autocast keeps the 16-bit copies of parameters
};

}  // namespace hvd::detail
