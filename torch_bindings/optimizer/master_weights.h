#pragma once
/// MasterWeights trains a model of 16-bit weights with fp32 masters (Micikevicius et al.: Mixed
/// precision training, 2018; apex' level O2): the optimizer steps masters in fp32, with a state in
/// fp32, and the model's bf16 or fp16 parameters are those masters, rounded.
///
///     model->to(at::kBFloat16);  // or some of its layers: batch norm may stay in fp32
///     auto adam = std::make_unique<torch::optim::AdamW>(model->parameters(), 1e-3);
///     auto masters = std::make_unique<hvd::MasterWeights>(std::move(adam));
///     hvd::DistributedOptimizer optimizer(std::move(masters), model->named_parameters());
///
/// Make it around the optimizer, and wrap it then, if several ranks train; around a
/// DistributedOptimizer it is refused. What is wrapped may also be the optimizer that it is around.
/// Gradients travel as they are, in 16 bits, and become fp32 when the optimizer steps. GradScaler
/// and clip_grad_norm_ apply to the fp32 gradients; fp16 ones go with a GradScaler here. Parameters
/// in fp32 (batch norm's) are stepped as ever. With shard_optimizer_state each rank has the masters
/// of its share alone.
///
/// What is written to the model's parameters between steps (broadcast_parameters, a checkpoint,
/// weight clipping under NoGradGuard) counts: masters follow, element by element, also where it
/// goes through `.data()`. What the optimizer writes (`save`, Checkpoint) holds the masters; a file
/// without them is read too.
///
/// One thread at a time uses it. It owns the masters, and the optimizer where it is given a
/// std::unique_ptr; else it refers to that, which must outlive it. While it lives the optimizer
/// must not be stepped by itself. It throws InvalidArgument for that, for a second one around an
/// optimizer, for an optimizer with a state of a kind that LibTorch does not know, and for
/// gradients that are changed after unscale_() or clipping.

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/precision/master_optimizer.h"

namespace hvd::detail {
class SharedGroups;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

/// A MasterWeights is an optimizer of 16-bit parameters around one that steps their fp32 masters.
class MasterWeights : public detail::MasterOptimizer {
 public:
  /// Wraps `optimizer`. Local. A state that it has already is taken to fp32.
  explicit MasterWeights(torch::optim::Optimizer& optimizer);
  /// Wraps an optimizer that this owns from then on, also where it throws. Throws InvalidArgument
  /// for null, too.
  explicit MasterWeights(std::unique_ptr<torch::optim::Optimizer> optimizer);
  /// Leaves the optimizer as one of 16-bit parameters, with its state rounded.
  ~MasterWeights() override;

  /// Steps the masters by the gradients of the parameters, and writes the parameters. Without
  /// gradient, a parameter stays.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Drops (or zeroes) the gradients of all parameters.
  void zero_grad(bool set_to_none = true);
  /// Ends a step that is not made (GradScaler), instead of `step()`.
  void leave_out_step() override;

  /// Returns the groups of the model's parameters. Options and parameters that are changed here or
  /// in the optimizer hold for both.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups();
  /// Returns the optimizer that this is around.
  torch::optim::Optimizer& wrapped() override { return wrapped_; }
  /// Returns the parameters that have masters, with these. Masters are made when there is a
  /// gradient for the first time. None where a DistributedOptimizer has shared them out.
  [[nodiscard]] std::vector<std::pair<at::Tensor, at::Tensor>> masters() const;

  /// Writes what the optimizer writes, and the masters.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads that. What it throws leaves all as it was.
  void load(torch::serialize::InputArchive& archive) override;

  /// @private For hvd.
  [[nodiscard]] detail::MasterCopies& copies() const override { return *copies_; }
  /// @private For hvd.
  void share_changes() override;

 private:
  std::unique_ptr<torch::optim::Optimizer> owned_;  ///< null where the user has it
  torch::optim::Optimizer& wrapped_;
  std::unique_ptr<detail::SharedGroups> groups_;
  std::unique_ptr<detail::MasterCopies> copies_;
};

}  // namespace hvd
#pragma GCC visibility pop
