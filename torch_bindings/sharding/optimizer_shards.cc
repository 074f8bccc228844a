#include "torch_bindings/sharding/optimizer_shards.h"

#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd {

namespace {

using torch::optim::Optimizer;

/// Those whose groups a wrapper shares out at present.
struct SharedOut {
  std::mutex mutex;
  std::set<const Optimizer*> optimizers;
};
std::shared_ptr<SharedOut> shared_out() {
  static const auto all = std::make_shared<SharedOut>();
  return all;
}

}  // namespace

void OptimizerShards::refuse_shares(const Optimizer& optimizer) {
  const auto all = shared_out();
  const std::lock_guard lock(all->mutex);
  if (all->optimizers.contains(&optimizer))
    throw InvalidArgument(
        "the state of this optimizer is in shares: another DistributedOptimizer with shard_optimizer_state is around it; call its "
        "unshard() "
        "on all ranks, or end it, first");
  for (const auto& [key, state] : optimizer.state())
    if (state && detail::is_left_over(*state))
      throw InvalidArgument(
          "the state of this optimizer was in shares when the DistributedOptimizer around it ended, and is not whole; call unshard() on "
          "all "
          "ranks before that, or make the optimizer anew (or clear its state()) to start without a state");
}

OptimizerShards::OptimizerShards(Optimizer& wrapped, const ProcessSet& process_set, std::string name, const Named& parameters,
                                 bool share_parameters, detail::MasterCopies* masters, const Runs& runs)
    : wrapped_(wrapped),
      process_set_(process_set),
      shared_(share_parameters && process_set.size() > 1 ? std::make_unique<SharedParameters>(process_set, name) : nullptr),
      owners_(shared_ ? shared_->owners() : process_set.ranks()),
      self_(shared_ ? shared_->self() : static_cast<std::size_t>(process_set.rank())),
      name_(std::move(name)),
      masters_(masters),
      is_known_(detail::fresh_state(wrapped) != nullptr),
      stepped_(!wrapped.state().empty()) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&wrapped) != nullptr)
    throw InvalidArgument("shard_optimizer_state: LBFGS looks at all parameters at once, so its state cannot be shared out");
  add(parameters, 0, runs);
  mark();
  const auto all = shared_out();
  const std::lock_guard lock(all->mutex);
  all->optimizers.insert(&wrapped_);
}

OptimizerShards::~OptimizerShards() {
  take_back();
  {
    const auto all = shared_out();
    const std::lock_guard lock(all->mutex);
    all->optimizers.erase(&wrapped_);
  }
  wrapped_.state().erase(this);
  if (given_back_ || !is_known_) return;
  const bool had_state = has_state();
  for (const auto& piece : pieces_) wrapped_.state().erase(piece.tensor.unsafeGetTensorImpl());
  if (!had_state) return;
  for (const auto& piece : pieces_) wrapped_.state()[piece.parameter.unsafeGetTensorImpl()] = detail::state_in_shares(wrapped_);
}

/// For torch::save of the wrapped optimizer, which would write this rank's share as if it were all: a state of no parameter, that refuses.
/// Its tensors have no elements, so that who goes through all states meets nothing unusual.
void OptimizerShards::mark() {
  if (!is_known_) return;
  auto state = detail::state_in_shares(wrapped_);
  for (at::Tensor* const tensor : detail::parts_of(*state).tensors) *tensor = at::empty({0});
  wrapped_.state()[this] = std::move(state);
}

/// Whether any rank has a state, as far as all of them can tell alike.
bool OptimizerShards::has_state() const {
  if (masters_ != nullptr) return stepped_;
  if (dynamic_cast<const torch::optim::SGD*>(&wrapped_) == nullptr) return stepped_;
  const auto& groups = std::as_const(wrapped_).param_groups();
  return stepped_ && std::any_of(groups.begin(), groups.end(), [](const auto& group) {
           return static_cast<const torch::optim::SGDOptions&>(group.options()).momentum() != 0;
         });
}

void OptimizerShards::add(const Named& parameters, std::size_t first, const Runs& runs) {
  const at::NoGradGuard no_gradient;
  const std::span added = std::span(parameters).subspan(first);
  shared_ ? shared_->add(added) : move_into_shared_memory(added);
  detail::MasterCopies::Masters masters;
  if (masters_ != nullptr) masters = masters_->release();
  States states;  // of the new ones, whole
  for (const auto& [name, parameter] : added) {
    const auto found = wrapped_.state().find(parameter.unsafeGetTensorImpl());
    if (found == wrapped_.state().end()) continue;
    states[found->first] = std::move(found->second);
    wrapped_.state().erase(found);
  }
  auto pieces = cut(added, runs);
  for (auto& piece : pieces) {
    piece.travels = view_of(piece);
    piece.strides = piece.parameter.strides().vec();
    make_tensor(piece, masters);
  }
  pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  keep_share(std::move(states));
  arrange();
}

/// What the wrapped optimizer steps in the piece's place.
void OptimizerShards::make_tensor(Piece& piece, const detail::MasterCopies::Masters& masters) {
  if (has_master(piece) && is_mine(piece)) {
    const auto whole = masters.find(piece.parameter.unsafeGetTensorImpl());
    piece.master.emplace(piece.parameter, whole == masters.end() ? at::Tensor() : whole->second, piece.begin,
                         piece.is_whole() ? -1 : piece.end);
    piece.tensor = piece.master->tensor();
  } else if (is_known_) {
    piece.tensor = piece.is_whole() ? piece.parameter.detach() : piece.travels.detach();
  } else {
    piece.tensor = piece.parameter;
  }
}

void OptimizerShards::check_untouched() {
  if (!is_known_ || states_checked_ == wrapped_.state().size()) return;
  for (const auto& piece : pieces_)
    if (wrapped_.state().count(piece.parameter.unsafeGetTensorImpl()) > 0)
      throw InvalidArgument(formatted(
          "the optimizer was stepped by itself while its state is in shares (it now has a state of its own for parameter '{}'): step "
          "the DistributedOptimizer around it, or call unshard() on all ranks first",
          piece.name));
  states_checked_ = wrapped_.state().size();
}

void OptimizerShards::lend() {
  if (std::exchange(lent_, true)) return;
  const at::NoGradGuard no_gradient;
  for (std::size_t g = 0; g < shares_.size(); ++g) std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  stepped_ = true;
  follow_memory();
  try {
    for (auto& piece : pieces_) lend_gradient(piece);
  } catch (...) {
    take_back();
    throw;
  }
}

void OptimizerShards::lend_gradient(Piece& piece) const {
  if (!is_mine(piece) || (piece.tensor.is_same(piece.parameter) && !keeps_gradients_)) return;
  if (piece.master) piece.master->follow();
  piece.tensor.mutable_grad() = gradient_of(piece);
}

void OptimizerShards::take_back() {
  if (!std::exchange(lent_, false)) return;
  for (std::size_t g = 0; g < shares_.size(); ++g) std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  const at::NoGradGuard no_gradient;
  for (auto& piece : pieces_) {
    if (!is_mine(piece) || (piece.tensor.is_same(piece.parameter) && !keeps_gradients_)) continue;
    if (piece.master && piece.tensor.grad().defined()) piece.master->write();
    piece.tensor.mutable_grad().reset();
  }
}

void OptimizerShards::begin_update(const std::string& refusal) {
  if (!shared_) {
    if (!refusal.empty()) share_pieces(refusal);
    return;
  }
  const bool moved = shared_->begin_update(refusal);
  updating_ = true;
  if (!moved) return;
  follow_memory();
  malloc_trim(0);  // each rank had a copy
}

void OptimizerShards::end_update() {
  if (shared_) {
    updating_ = false;
    shared_->end_update();
  } else {
    share_pieces({});
  }
}

void OptimizerShards::fail_update(const std::string& failure) {
  if (std::exchange(updating_, false)) shared_->end_update(failure);
}

void OptimizerShards::interrupt_update() {
  take_back();
  if (std::exchange(updating_, false)) shared_->end_update();
}

void OptimizerShards::resume_update() {
  begin_update();
  lend();
}

void OptimizerShards::share_pieces(const std::string& refusal) {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> tensors;
  for (auto& piece : pieces_) tensors.push_back(refusal.empty() ? piece.travels : piece.travels.unsqueeze(0));  // which is a Mismatch
  try {
    broadcast_pieces(tensors, "parameters");
  } catch (const Deadlock&) {  // the others are somewhere else
    throw;
  } catch (const Mismatch& error) {
    const std::string mine = refusal.empty() ? "" : formatted("; rank {} has made no step: {}", rank(), refusal);
    const std::string all = detail::said_by_all(mine, name_ + "/refused", process_set_);
    if (all.empty()) throw;
    for (std::size_t i = 0; i < pieces_.size(); ++i) tensors[i] = pieces_[i].travels;
    broadcast_pieces(tensors, "parameters");
    throw Mismatch(error.what() + all);
  }
}

/// `tensors`: one for each piece, from its owner to all; undefined ones stay. A submission for each owner and device.
void OptimizerShards::broadcast_pieces(const std::vector<at::Tensor>& tensors, const std::string& what) const {
  if (process_set_.size() == 1) return;
  std::map<std::pair<std::size_t, std::string>, std::pair<std::vector<at::Tensor>, std::vector<std::string>>> groups;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    const Piece& piece = pieces_[i];
    const std::string device = tensors[i].device().str();
    auto& [members, names] = groups[{piece.owner, device.substr(0, device.find(':'))}];
    members.push_back(tensors[i]);
    names.push_back(piece.name);
  }
  std::vector<Handle<std::vector<at::Tensor>>> handles;
  for (auto& [key, group] : groups)
    handles.push_back(
        detail::grouped_broadcast_async_(std::move(group.first), std::move(group.second),
                                         {.name = formatted("{}/{} of rank {} on {}", name_, what, owners_[key.first], key.second),
                                          .root_rank = owners_[key.first],
                                          .process_set = process_set_}));
  for (const auto& handle : handles) handle.wait();
}

}  // namespace hvd
