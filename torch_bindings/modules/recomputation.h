#pragma once
/// The surroundings of a function that is computed again
/// (torch_bindings/modules/activation_checkpoint.h): AmbientState is what its result depends on
/// beside its inputs, KeptStatistics what it changes beside its outputs. Thread: a scope belongs to
/// the thread that made it; generators are the process's, autocast and the world are the thread's.
/// Own copies of the states. Throw what LibTorch's generators do.
// Tested in tests/torch_bindings/modules/activation_checkpoint_test.cc

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <utility>
#include <vector>

#include "hvd/world.h"
#include "torch_bindings/precision/autocast.h"

namespace hvd::detail {

/// The random numbers' generators (of the CPU, and of GPUs that are in use), autocast and the
/// world, as they were when this was made.
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
    const WorldScope world_;
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
  World world_ = World::current();
};

/// A guard for running statistics of batch norm, which have had this batch already: while one
/// lives, batch_norm and instance_norm change their running statistics, and modules their counters
/// of batches, for that time only. SyncBatchNorm asks. Throws nothing.
class [[nodiscard]] KeptStatistics {
 public:
  KeptStatistics();
  ~KeptStatistics();
  KeptStatistics(const KeptStatistics&) = delete;
  KeptStatistics& operator=(const KeptStatistics&) = delete;
  /// Returns whether one lives in this thread.
  [[nodiscard]] static bool are_kept();
};

}  // namespace hvd::detail
