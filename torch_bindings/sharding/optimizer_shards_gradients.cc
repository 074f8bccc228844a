// The shares of gradients that OptimizerShards keeps: ZeRO stage 2.
#include <torch/torch.h>

#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd {

const std::vector<std::int64_t>& OptimizerShards::parts(const at::Tensor& parameter) const {
  return parts_.at(parameter.unsafeGetTensorImpl());
}

void OptimizerShards::keep(const at::Tensor& parameter, const at::Tensor& reduced) {
  const auto mine = mine_.find(parameter.unsafeGetTensorImpl());
  if (mine == mine_.end()) return;
  const at::NoGradGuard no_gradient;
  for (const auto index : mine->second) {
    Piece& piece = pieces_[index];
    const at::Tensor part =
        piece.is_whole() ? reduced.detach() : detail::in_memory_order_of(reduced, parameter).slice(0, piece.begin, piece.end);
    const at::Tensor typed = part.to(parameter.scalar_type(), false, /*copy=*/true);
    const at::Tensor share = typed.to(state_type(piece));
    piece.gradient = piece.gradient.defined() ? piece.gradient.add_(share) : share;
  }
}

void OptimizerShards::drop(const at::Tensor& parameter) {
  const auto mine = mine_.find(parameter.unsafeGetTensorImpl());
  if (mine == mine_.end()) return;
  for (const auto index : mine->second) pieces_[index].gradient.reset();
}

void OptimizerShards::drop_gradients() {
  for (auto& piece : pieces_) piece.gradient.reset();
}

std::vector<std::pair<std::string, at::Tensor>> OptimizerShards::gradients() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& piece : pieces_)
    if (piece.gradient.defined()) all.emplace_back(piece.name, piece.gradient);
  return all;
}

/// The gradient that the wrapped optimizer sees of one of this rank's pieces; undefined if there is none.
at::Tensor OptimizerShards::gradient_of(const Piece& piece) const {
  const at::Tensor& gradient = piece.parameter.grad();
  if (!gradient.defined()) return piece.gradient;  // what there is in `.grad` where shares are kept, a user has put there
  const at::Tensor part =
      piece.is_whole() ? gradient : detail::in_memory_order_of(gradient, piece.parameter).slice(0, piece.begin, piece.end);
  return piece.master ? masters_->wide(piece.parameter, part) : part;
}

}  // namespace hvd
