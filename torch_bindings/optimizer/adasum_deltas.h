#pragma once
/// The changes by which an optimizer steps with ReduceOp::Adasum (Maleki et al., "Scaling
/// Distributed Training with Adaptive Summation", MLSys 2021, in the delta form): each rank lets
/// its optimizer step on its own gradients, and what that has changed in the parameters is
/// combined. So orthogonal changes add and parallel ones average, parameter by parameter, with any
/// optimizer; all ranks get the same bits. The optimizer's state is that of this rank's own steps.
/// Threads: hooks run in autograd's threads; the rest in the optimizer's. Owns two copies of the
/// parameters: as they were before the step, and what travels. Errors: InvalidArgument for a
/// parameter that Adasum cannot combine; what an allreduce throws, and then the parameters are what
/// they were before the step. A rank whose own step has failed tells the others: Mismatch.
// Tested in tests/torch_bindings/what_if/what_if_adasum_test.cc

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/parameters/replica_guard.h"

namespace hvd {

namespace detail {
struct GradientCalls;
class StepWatch;
}  // namespace detail

/// The changes of one optimizer's parameters.
class AdasumDeltas {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  struct Terms {
    Compression compression;  ///< none, fp16 or bf16
    ProcessSet process_set;
    std::string name;                 ///< of its collectives
    int passes = 1;                   ///< backward passes per step; one more is an error
    ReplicaComparer::Terms replicas;  ///< what ranks compare with each step, beside the parameters
    std::shared_ptr<detail::StepWatch> witness{};  ///< is told of each gradient; null: nobody is
  };
  explicit AdasumDeltas(Terms terms);
  ~AdasumDeltas();
  AdasumDeltas(const AdasumDeltas&) = delete;
  AdasumDeltas& operator=(const AdasumDeltas&) = delete;

  /// Takes in the parameters from place `first` on, of all that there are now. Local.
  void add(const Named& parameters, std::size_t first);
  /// Collective: compares the replicas, and remembers the parameters; then the optimizer steps.
  void remember();
  /// Collective: makes each parameter what it was plus the combined changes of all ranks. With a
  /// `refusal` on any rank all throw Mismatch, with its words, and parameters are what they were;
  /// ranks that all refuse get back no more than that.
  void combine(const std::string& refusal);
  /// Puts back what was remembered, after a step that has failed.
  void put_back();
  /// Forgets the backward passes so far, and puts back the hooks that a user's have replaced.
  void begin_step();
  void set_passes(int passes);
  /// Collective. Compares parameters and options between the ranks. Throws Mismatch, on all of
  /// them, where they differ.
  void check_replicas();

 private:
  struct Passes;
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::Tensor start;  ///< the parameter before the step
    at::Tensor wire;   ///< its change
    std::optional<unsigned> before_hook;
  };
  void put_hooks();
  [[nodiscard]] detail::GradientCalls calls_at(std::size_t place) const;
  void make_room(Slot& slot) const;
  [[nodiscard]] std::shared_ptr<HandleState> submit(const std::vector<std::size_t>& slots,
                                                    std::size_t number, bool refused);

  const Terms terms_;
  std::vector<Slot> slots_;
  std::shared_ptr<Passes> passes_;
  ReplicaComparer replicas_;
};

}  // namespace hvd
