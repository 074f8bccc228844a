// The state of an optimizer that OptimizerShards has shared out: put together, dealt, written and read.
#include <torch/torch.h>

#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/optimizer_shards.h"
#include "torch_bindings/repeated_parameters.h"
#include "torch_bindings/state_parts.h"
#include "torch_bindings/tensors.h"

namespace hvd {

OptimizerShards::States OptimizerShards::gather_state() {
  if (!detail::fresh_state(wrapped_))
    throw InvalidArgument("shard_optimizer_state: LibTorch does not know this optimizer, so its state cannot be put together to be saved");
  // What there is of each piece: whether it has a state, which tensors that has, and its step.
  at::Tensor known = at::zeros({static_cast<std::int64_t>(pieces_.size()), 3}, at::kLong);
  auto word = known.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const auto found = wrapped_.state().find(pieces_[i].tensor.unsafeGetTensorImpl());
    if (!is_mine(pieces_[i]) || found == wrapped_.state().end()) continue;
    const auto row = static_cast<std::int64_t>(i);
    const detail::StateParts parts = detail::parts_of(*found->second);
    word[row][0] = 1;
    if (!detail::is_all_parts(*found->second)) word[row][0] = 2;
    for (std::size_t t = 0; t < parts.tensors.size(); ++t)
      if (parts.tensors[t]->defined()) word[row][1] |= std::int64_t{1} << t;
    if (parts.step != nullptr) word[row][2] = *parts.step;
  }
  // Zeros but from the owner; from one on each host, where each has a copy.
  allreduce_(known, {.name = name_ + "/state", .op = ReduceOp::Max, .process_set = process_set_});
  if (pieces_.empty() || known.select(1, 0).max().item<std::int64_t>() < 2) return gather_parts(known);
  throw InvalidArgument(
      "shard_optimizer_state: the optimizer keeps states of a type of its own, which derives from one of LibTorch's; what that has besides "
      "cannot be put together");
}

/// `known`: what there is of each piece on its owner.
OptimizerShards::States OptimizerShards::gather_parts(const at::Tensor& known) {
  const auto word = known.accessor<std::int64_t, 2>();
  States whole;
  const std::size_t fields = detail::parts_of(*detail::fresh_state(wrapped_)).tensors.size();
  for (std::size_t t = 0; t < fields; ++t) {
    std::vector<at::Tensor> tensors(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      const auto row = static_cast<std::int64_t>(i);
      if (word[row][0] == 0) continue;
      const at::Tensor& parameter = piece.parameter;
      auto& state = whole[parameter.unsafeGetTensorImpl()];
      if (!state) state = detail::fresh_state(wrapped_);
      const detail::StateParts parts = detail::parts_of(*state);
      if (parts.step != nullptr) *parts.step = word[row][2];
      if ((word[row][1] >> t & 1) == 0) continue;
      at::Tensor& all = *parts.tensors[t];
      if (!all.defined()) all = at::zeros_like(parameter, parameter.options().requires_grad(false).dtype(state_type(piece)));
      const bool cut = !piece.is_whole();
      tensors[i] = cut ? detail::in_memory_order(all).slice(0, piece.begin, piece.end) : all;
      if (!is_mine(piece)) continue;
      const at::Tensor& own = *detail::parts_of(*wrapped_.state().at(piece.tensor.unsafeGetTensorImpl())).tensors[t];
      tensors[i].copy_(own);
    }
    broadcast_pieces(tensors, formatted("state {}", t));
  }
  return whole;
}

/// The wrapped optimizer's state gets this rank's share of `whole`, which is by parameter.
void OptimizerShards::keep_share(States whole) {
  auto& states = wrapped_.state();
  for (const auto& piece : pieces_) {
    const auto found = whole.find(piece.parameter.unsafeGetTensorImpl());
    if (!is_mine(piece) || found == whole.end()) continue;
    if (piece.is_whole()) {
      if (has_master(piece))
        for (at::Tensor* const tensor : detail::parts_of(*found->second).tensors)
          if (tensor->defined()) *tensor = tensor->to(at::kFloat);
      states[piece.tensor.unsafeGetTensorImpl()] = std::move(found->second);
      continue;
    }
    auto state = detail::fresh_state(wrapped_);
    const detail::StateParts from = detail::parts_of(*found->second);
    const detail::StateParts to = detail::parts_of(*state);
    if (to.step != nullptr) *to.step = *from.step;
    for (std::size_t t = 0; t < to.tensors.size(); ++t)
      if (from.tensors[t]->defined())
        *to.tensors[t] = detail::in_memory_order_of(*from.tensors[t], piece.parameter)
                             .slice(0, piece.begin, piece.end)
                             .to(has_master(piece) ? at::kFloat : from.tensors[t]->scalar_type(), false, /*copy=*/true);
    states[piece.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

void OptimizerShards::give_back() {
  const at::NoGradGuard no_gradient;
  const auto masters = gather_masters();
  if (is_known_) {
    wrapped_.state() = gather_state();
  } else {
    at::Tensor states = at::full({1}, static_cast<std::int64_t>(wrapped_.state().size()), at::kLong);
    allreduce_(states, {.name = name_ + "/states", .op = ReduceOp::Max, .process_set = process_set_});
    if (states.item<std::int64_t>() > 0)
      throw InvalidArgument("unshard(): LibTorch does not know this optimizer, so its state, which is in shares, cannot be put together");
  }
  given_back_ = true;
  if (masters_ != nullptr) masters_->adopt(masters);
}

/// Collective: all masters, whole, on every rank.
detail::MasterCopies::Masters OptimizerShards::gather_masters() const {
  detail::MasterCopies::Masters all;
  std::vector<at::Tensor> tensors(pieces_.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (!has_master(piece)) continue;
    at::Tensor& whole = all[piece.parameter.unsafeGetTensorImpl()];
    if (!whole.defined()) whole = at::zeros_like(piece.parameter, piece.parameter.options().requires_grad(false).dtype(at::kFloat));
    tensors[i] = piece.is_whole() ? whole : detail::in_memory_order(whole).slice(0, piece.begin, piece.end);
    if (piece.master) tensors[i].copy_(piece.master->tensor());
  }
  broadcast_pieces(tensors, "masters");
  return all;
}

std::function<void()> OptimizerShards::remember_masters() {
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const auto& piece : pieces_)
    if (piece.master) before.emplace_back(piece.master->tensor(), piece.master->tensor().clone());
  return [before = std::move(before)] {
    for (const auto& [master, then] : before) at::Tensor(master).copy_(then);
  };
}

void OptimizerShards::save(torch::serialize::OutputArchive& archive) {
  const at::NoGradGuard no_gradient;
  struct Undone {  // whatever happens, the share comes back
    OptimizerShards& self;
    States share;
    ~Undone() { self.wrapped_.state() = std::move(share); }
  };
  const auto masters = gather_masters();
  States whole = gather_state();
  const Undone undone{*this, std::exchange(wrapped_.state(), std::move(whole))};
  if (masters_ == nullptr) return wrapped_.save(archive);
  detail::MasterCopies::write(archive, wrapped_, masters);
  const detail::RepeatedParameters each_once(wrapped_, detail::RepeatedParameters::Places::LeftOut);
  wrapped_.save(archive);
}

void OptimizerShards::load(const std::function<void()>& load_wrapped, torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_gradient;
  detail::MasterCopies::Masters masters;
  if (masters_ != nullptr) masters = detail::MasterCopies::read(archive, wrapped_);
  States before = std::exchange(wrapped_.state(), {});
  try {
    load_wrapped();
  } catch (...) {
    wrapped_.state() = std::move(before);
    throw;
  }
  stepped_ = true;
  keep_share(std::exchange(wrapped_.state(), {}));
  mark();
  for (auto& piece : pieces_)
    if (const auto whole = masters.find(piece.parameter.unsafeGetTensorImpl()); piece.master && whole != masters.end())
      piece.master->load(whole->second);
}

}  // namespace hvd
