#pragma once
/// Parameters that are listed several times. One parameter is one TensorImpl, however many names a
/// model has for it: tied weights (a decoder that uses the embedding's weight) are listed twice by
/// LibTorch's `parameters()` and `named_parameters()`, and by the groups of an optimizer that was
/// made with these. Thread: the optimizer's; `unique_parameters` any. Throws nothing of its own.
// Tested in tests/torch_bindings/what_if/what_if_tied_test.cc

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hvd::detail {

/// Returns every tensor of `named` once, at its first place. One with several names gets them all,
/// sorted and joined, so that ranks which list them in another order call it the same:
/// "decoder.weight = embedding.weight". Undefined tensors are kept as they are.
std::vector<std::pair<std::string, at::Tensor>> unique_parameters(
    const std::vector<std::pair<std::string, at::Tensor>>& named);

/// A guard for the groups of an optimizer whose state is written or read: while it lives, each
/// parameter is in them once, at its first place. LibTorch's `load` moves a state to the first of a
/// parameter's places, and then what is left of it, nothing, to the others. Refers to the
/// optimizer, which must outlive it.
class RepeatedParameters {
 public:
  /// The treatment of the other places.
  enum class Places : std::uint8_t {
    LeftOut,  ///< the groups are shorter: for what is written and read in a form of our own, each
              ///< parameter once
    Kept,  ///< a tensor of no elements stands there: for what `save` wrote while the parameter was
           ///< listed several times
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

/// Loads what torch::save wrote as `optimizer.load()`, also where a group lists a parameter twice.
void load_state(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace hvd::detail
