#pragma once
/// Groups of an optimizer that list a parameter several times (tied weights), while its state is written and read: LibTorch's `load` moves
/// a state to the first of a parameter's places, and then what is left of it, nothing, to the others.
/// Thread: the optimizer's. Refers to the optimizer, which must outlive it. Throws nothing of its own.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace hvd::detail {

/// While it lives, each parameter is in the groups once, at its first place.
class RepeatedParameters {
 public:
  /// What becomes of the other places.
  enum class Places : std::uint8_t {
    LeftOut,  ///< the groups are shorter: for what is written and read in a form of our own, each parameter once
    Kept,     ///< a tensor of no elements stands there: for what `save` wrote while the parameter was listed several times
  };
  RepeatedParameters(torch::optim::Optimizer& optimizer, Places places);
  ~RepeatedParameters();
  RepeatedParameters(const RepeatedParameters&) = delete;
  RepeatedParameters& operator=(const RepeatedParameters&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> groups_;  ///< as they were; empty if nothing is repeated
  std::vector<at::Tensor> instead_;
};

/// Loads what torch::save wrote, as `optimizer.load()` does, also where a group lists a parameter twice.
void load_state(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace hvd::detail
