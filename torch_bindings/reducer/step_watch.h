#pragma once
/// Notices that the optimizer in a wrapper was stepped by itself: by gradients that were on their
/// way, or by this rank's own alone. C++ has both names in scope, and Optimizer::step() of the
/// wrapped one tells nobody; so the traces are looked for that it leaves between the gradient that
/// backward gives and the wrapper's next call. They are those of a step, not of any other write to
/// parameters, which is the user's right: a state that has counted on; of SGD without momentum,
/// which has no state and writes through `.data()`, that a few elements of the parameters went by
/// just learning rate times gradient. Not seen are optimizers of the user's own, and SGD without
/// momentum on a GPU, unless the wrapper is not called for several passes: the ranks' parameters
/// differ then. Threads: `on_gradient` in autograd's, the rest in the optimizer's. One mutex.
/// Refers to the wrapped optimizer. Throws from `refuse_step` alone.
// Tested in tests/torch_bindings/optimizer/one_name_test.cc

#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hvd::detail {

class StepWatch {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  explicit StepWatch(const torch::optim::Optimizer& wrapped) : wrapped_(wrapped) {}

  /// Backward has just given this parameter's gradient; `anew`: the one before has been thrown
  /// away. Returns whether the optimizer has been stepped by itself meanwhile: since the
  /// parameter's gradient before, or in each of several passes since the wrapper was called.
  bool on_gradient(const at::Tensor& parameter, bool anew);
  /// Returns what there is to say of it.
  static std::string words_of(const std::string& name);
  /// Returns the name of a parameter that the optimizer has stepped since its gradient came; empty
  /// if it has not stepped.
  [[nodiscard]] std::string stepped(const Named& parameters) const;
  /// The wrapper is called: what has been until now is as it should be.
  void attend();
  /// Does the same, and throws InvalidArgument where the optimizer has stepped one of these.
  void refuse_step(const Named& parameters);

 private:
  static constexpr std::size_t kSamples = 4;
  using Samples = std::array<double, kSamples>;
  /// A mark of the counters in a parameter's state that a step counts on.
  struct StateMark {
    bool exists = false;
    std::int64_t steps = 0;
    const void* tensor = nullptr;
    std::int64_t version = 0;
  };
  /// The parameter, as it was when its gradient came.
  struct Note {
    int pass = -1;
    bool open = false;  ///< the wrapper has not been called since
    std::int64_t version = 0;
    bool sampled = false;
    Samples values{}, gradients{};
    StateMark state;
    int unattended = 0;  ///< passes in a row whose gradient was thrown away after a write
  };
  [[nodiscard]] StateMark state_of(const at::Tensor& parameter) const;
  [[nodiscard]] bool has_counted_on(const at::Tensor& parameter, const Note& note) const;
  [[nodiscard]] static bool was_written(const at::Tensor& parameter, const Note& note);
  [[nodiscard]] std::pair<std::size_t, std::size_t> steps_of_sgd(const at::Tensor& parameter,
                                                                 const Note& note, double rate,
                                                                 double decay) const;

  const torch::optim::Optimizer& wrapped_;
  mutable std::mutex mutex_;
  std::unordered_map<const void*, Note> notes_;  ///< by parameter
};

}  // namespace hvd::detail
