#include "torch_bindings/sharding/gradient_shares.h"

#include <torch/torch.h>

#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

void GradientShares::arrange(std::size_t shares, const std::unordered_set<const void*>& stepped) {
  mine_.clear();
  parts_.clear();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    ShardPiece& piece = pieces_[i];
    const void* const key = piece.parameter.unsafeGetTensorImpl();
    auto& parts = parts_.try_emplace(key, shares, 0).first->second;
    left_.try_emplace(key, Left::Nothing);
    parts[piece.owner] += piece.end - piece.begin;
    if (!stepped.contains(key)) {
      piece.gradient.reset();
    } else if (piece.is_mine) {
      mine_[key].push_back(i);
    }
  }
}

const std::vector<std::int64_t>& GradientShares::parts(const at::Tensor& parameter) const {
  return parts_.at(parameter.unsafeGetTensorImpl());
}

void GradientShares::keep(const at::Tensor& parameter, const at::Tensor& reduced) {
  left_.at(parameter.unsafeGetTensorImpl()) = Left::Gradient;
  const auto mine = mine_.find(parameter.unsafeGetTensorImpl());
  if (mine == mine_.end()) return;
  const at::NoGradGuard no_gradient;
  for (const auto index : mine->second) {
    ShardPiece& piece = pieces_[index];
    const at::Tensor part =
        piece.is_whole() ? reduced.detach()
                         : in_memory_order_of(reduced, parameter).slice(0, piece.begin, piece.end);
    const at::Tensor typed = part.to(parameter.scalar_type(), false, /*copy=*/true);
    const at::Tensor share = typed.to(piece.state_type());
    piece.gradient = piece.gradient.defined() ? piece.gradient.add_(share) : share;
  }
}

void GradientShares::drop(const at::Tensor& parameter) {
  left_.at(parameter.unsafeGetTensorImpl()) = Left::Nothing;
  const auto mine = mine_.find(parameter.unsafeGetTensorImpl());
  if (mine == mine_.end()) return;
  for (const auto index : mine->second) pieces_[index].gradient.reset();
}

void GradientShares::drop_all() {
  for (auto& piece : pieces_) piece.gradient.reset();
}

void GradientShares::zero(bool set_to_none) {
  drop_all();
  for (auto& [parameter, left] : left_)
    left = set_to_none || left == Left::Nothing ? Left::Nothing : Left::Zeros;
}

void GradientShares::leave_zeros() const {
  const at::NoGradGuard no_gradient;
  for (const auto& piece : pieces_)
    if (left_.at(piece.parameter.unsafeGetTensorImpl()) == Left::Zeros)
      piece.parameter.mutable_grad() = at::zeros_like(piece.parameter);
}

std::vector<std::pair<std::string, at::Tensor>> GradientShares::all() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& piece : pieces_)
    if (piece.gradient.defined()) all.emplace_back(piece.name, piece.gradient);
  return all;
}

at::Tensor GradientShares::of(const ShardPiece& piece, const MasterCopies* masters) const {
  const at::Tensor& gradient = piece.parameter.grad();
  // what there is in `.grad` where shares are kept, a user has put there
  if (!gradient.defined()) {
    const auto left = left_.find(piece.parameter.unsafeGetTensorImpl());
    const bool is_zero = left != left_.end() && left->second == Left::Zeros;
    return piece.gradient.defined() || !is_zero ? piece.gradient : at::zeros_like(piece.tensor);
  }
  const at::Tensor part =
      piece.is_whole()
          ? gradient
          : in_memory_order_of(gradient, piece.parameter).slice(0, piece.begin, piece.end);
  return piece.master ? masters->wide(piece.parameter, part) : part;
}

}  // namespace hvd::detail
