#include "torch_bindings/sharding/optimizer_shards.h"

#include <c10/util/ScopeExit.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/parameters/share_memory.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd {

namespace {

using torch::optim::Optimizer;

/// The optimizers whose groups a wrapper shares out at present.
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
        "the state of this optimizer is in shares: another DistributedOptimizer with "
        "shard_optimizer_state is around it; call its unshard() on all ranks, or end it, first");
  for (const auto& [key, state] : optimizer.state())
    if (state && detail::is_left_over(*state))
      throw InvalidArgument(
          "the state of this optimizer was in shares when the DistributedOptimizer around it "
          "ended, and is not whole; call unshard() on all ranks before that, or make the optimizer "
          "anew (or clear its state()) to start without a state");
}

OptimizerShards::OptimizerShards(Optimizer& wrapped, const ProcessSet& process_set,
                                 std::string name, const Named& parameters, bool share_parameters,
                                 detail::MasterCopies* masters, const Runs& runs)
    : wrapped_(wrapped),
      process_set_(process_set),
      shared_(share_parameters && process_set.size() > 1
                  ? std::make_unique<SharedParameters>(process_set, name,
                                                       [this] { return equalize_hosts(); })
                  : nullptr),
      self_(shared_ ? shared_->self() : static_cast<std::size_t>(process_set.rank())),
      masters_(masters),
      is_known_(detail::fresh_state(wrapped) != nullptr),
      exchange_(pieces_, process_set, shared_ ? shared_->owners() : process_set.ranks(),
                std::move(name)),
      state_(wrapped, pieces_, exchange_),
      stepped_(!wrapped.state().empty()) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&wrapped) != nullptr)
    throw InvalidArgument(
        "shard_optimizer_state: LBFGS looks at all parameters at once, so its state cannot be "
        "shared out");
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
  for (const auto& piece : pieces_)
    wrapped_.state()[piece.parameter.unsafeGetTensorImpl()] = detail::state_in_shares(wrapped_);
}

/// Marks the state, so that torch::save of the wrapped optimizer does not write this rank's share
/// as if it were all: by a state of no parameter, that refuses. Its tensors have no elements, so
/// that who goes through all states meets nothing unusual.
void OptimizerShards::mark() {
  if (!is_known_) return;
  auto state = detail::state_in_shares(wrapped_);
  for (at::Tensor* const tensor : detail::parts_of(*state).tensors) *tensor = at::empty({0});
  wrapped_.state()[this] = std::move(state);
}

/// Returns whether any rank has a state, as far as all of them can tell alike.
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
  const auto added = detail::NamedParameters(parameters).subspan(first);
  check_states(added);
  if (shared_) {
    shared_->add(added);
  } else if (exchange_.owners().size() > 1) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, parameter] : added) tensors.push_back(parameter);
    detail::move_to_shared_memory(tensors);
  }
  detail::MasterCopies::Masters masters;
  if (masters_ != nullptr) masters = masters_->release();
  detail::ShardedState::States states;  // of the new ones, whole
  for (const auto& [name, parameter] : added) {
    const auto found = wrapped_.state().find(parameter.unsafeGetTensorImpl());
    if (found == wrapped_.state().end()) continue;
    states[found->first] = std::move(found->second);
    wrapped_.state().erase(found);
  }
  auto pieces = cut(added, runs);
  for (auto& piece : pieces) {
    piece.is_mine = piece.owner == self_;
    piece.has_master = masters_ != nullptr && detail::MasterCopy::is_for(piece.parameter);
    piece.travels = piece.view();
    piece.sizes = piece.parameter.sizes().vec();
    piece.strides = piece.parameter.strides().vec();
    make_tensor(piece, masters);
  }
  pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  state_.keep(std::move(states));
  arrange();
}

/// Throws InvalidArgument where the optimizer has a state of one of these, whole, that does not fit
/// it.
void OptimizerShards::check_states(detail::NamedParameters parameters) const {
  detail::MasterCopies::Masters masters;
  if (masters_ != nullptr) masters = masters_->masters();
  for (const auto& [name, parameter] : parameters) {
    const auto master = masters.find(parameter.unsafeGetTensorImpl());
    const at::Tensor& stepped = master == masters.end() ? parameter : master->second;
    const auto found = wrapped_.state().find(stepped.unsafeGetTensorImpl());
    if (found != wrapped_.state().end() && found->second)
      detail::ShardedState::check(*found->second, name, parameter);
  }
}

/// Cuts new parameters: into equal shares, or whole ones where the optimizer must see them so.
detail::ShardPieces OptimizerShards::cut(detail::NamedParameters parameters,
                                         const Runs& runs) const {
  const std::size_t shares = exchange_.owners().size();
  return detail::steps_by_element(wrapped_)
             ? detail::cut_into_shares(parameters, runs, shares, pieces_)
             : detail::deal_to_shares(parameters, shares, pieces_);
}

/// Makes what the wrapped optimizer steps in the piece's place.
void OptimizerShards::make_tensor(Piece& piece,
                                  const detail::MasterCopies::Masters& masters) const {
  if (piece.has_master && piece.is_mine) {
    const auto whole = masters.find(piece.parameter.unsafeGetTensorImpl());
    piece.master.emplace(piece.parameter, whole == masters.end() ? at::Tensor() : whole->second,
                         piece.begin, piece.is_whole() ? -1 : piece.end);
    piece.tensor = piece.master->tensor();
  } else if (is_known_) {
    piece.tensor = piece.is_whole() ? piece.parameter.detach() : piece.travels.detach();
  } else {
    piece.tensor = piece.parameter;
  }
}

/// Follows parameters that have got other memory since, as torch::load gives it.
void OptimizerShards::follow_memory() {
  for (auto& piece : pieces_) {
    const at::Tensor now = piece.view();
    if (now.const_data_ptr() == piece.travels.const_data_ptr()) continue;
    if (piece.parameter.sizes() != at::IntArrayRef(piece.sizes) ||
        piece.parameter.strides() != at::IntArrayRef(piece.strides) ||
        !piece.parameter.options().type_equal(piece.travels.options()))
      throw InvalidArgument(
          formatted("shard_optimizer_state: parameter '{}' has another shape, layout, type or "
                    "device than when its optimizer was wrapped; change the model first and wrap "
                    "the optimizer then",
                    piece.name));
    piece.travels = now;
    if (is_known_ && !piece.master)
      piece.tensor.set_data(piece.is_whole() ? piece.parameter.detach() : now.detach());
  }
}

/// Puts this rank's pieces where their parameters stand.
void OptimizerShards::arrange() {
  std::unordered_map<const void*, std::vector<at::Tensor>> mine;
  for (const auto& piece : pieces_)
    if (piece.is_mine) mine[piece.parameter.unsafeGetTensorImpl()].push_back(piece.tensor);
  std::unordered_set<const void*> stepped;
  shares_.clear();
  for (const auto& group : wrapped_.param_groups()) {
    auto& share = shares_.emplace_back();
    for (const auto& parameter : group.params()) {
      stepped.insert(parameter.unsafeGetTensorImpl());
      const auto found = mine.find(parameter.unsafeGetTensorImpl());
      if (found != mine.end())
        share.insert(share.end(), found->second.begin(), found->second.end());
    }
  }
  gradients_.arrange(exchange_.owners().size(), stepped);
}

GradientKeeper& OptimizerShards::keep_gradients() {
  gradients_.begin();
  return gradients_;
}

void OptimizerShards::check_untouched() {
  if (!is_known_ || states_checked_ == wrapped_.state().size()) return;
  for (const auto& piece : pieces_)
    if (wrapped_.state().count(piece.parameter.unsafeGetTensorImpl()) > 0)
      throw InvalidArgument(
          formatted("the optimizer was stepped by itself while its state is in shares (it now has "
                    "a state of its own for parameter '{}'): step the DistributedOptimizer around "
                    "it, or call unshard() on all ranks first",
                    piece.name));
  states_checked_ = wrapped_.state().size();
}

void OptimizerShards::lend() {
  if (lent_) return;
  const at::NoGradGuard no_gradient;
  stepped_ = true;  // also where this rank refuses: others may step
  follow_memory();
  lent_ = true;
  for (std::size_t g = 0; g < shares_.size(); ++g)
    std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  try {
    for (auto& piece : pieces_) {
      if (!is_lent_apart(piece)) continue;
      if (piece.master) piece.master->follow();
      piece.tensor.mutable_grad() = gradients_.of(piece, masters_);
    }
  } catch (...) {
    take_back();
    throw;
  }
}

/// Returns whether the wrapped optimizer steps another tensor than the parameter here, or with
/// another gradient than `.grad`.
bool OptimizerShards::is_lent_apart(const Piece& piece) const {
  return piece.is_mine && (gradients_.are_kept() || !piece.tensor.is_same(piece.parameter));
}

void OptimizerShards::take_back() {
  if (!std::exchange(lent_, false)) return;
  for (std::size_t g = 0; g < shares_.size(); ++g)
    std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  const at::NoGradGuard no_gradient;
  for (auto& piece : pieces_) {
    if (!is_lent_apart(piece)) continue;
    // what ranks have one copy of is written in an update alone
    if ((updating_ || !shared_) && piece.master && piece.tensor.grad().defined())
      piece.master->write();
    piece.tensor.mutable_grad().reset();
  }
}

void OptimizerShards::begin_update(const std::string& refusal) {
  if (!shared_ && !refusal.empty()) {
    try {
      follow_memory();
    } catch (const InvalidArgument&) {  // the others wait, and the next step says so
    }
    return share_pieces(refusal);
  }
  const bool moved = shared_ && shared_->begin_update(refusal);
  updating_ = true;
  begun_ = pieces_.size();
  if (!moved) return;
  follow_memory();
  malloc_trim(0);  // each rank had a copy
}

void OptimizerShards::end_update(const std::string& failure) {
  updating_ = false;
  shared_ ? shared_->end_update(failure) : share_pieces(failure);
}

void OptimizerShards::fail_update(const std::string& failure) {
  if (updating_) end_update(failure);
}

void OptimizerShards::interrupt_update() {
  take_back();
  if (std::exchange(updating_, false) && shared_) shared_->end_update();
}

void OptimizerShards::resume_update() {
  begin_update();
  lend();
}

void OptimizerShards::share_pieces(const std::string& refusal) {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> tensors;
  // which is a Mismatch
  for (auto& piece : pieces_)
    tensors.push_back(refusal.empty() ? piece.travels : piece.travels.unsqueeze(0));
  try {
    exchange_.broadcast(tensors, "parameters");
  } catch (const Deadlock&) {  // the others are somewhere else
    throw;
  } catch (const Mismatch& error) {
    const std::string mine =
        refusal.empty() ? "" : formatted("; rank {} has made no step: {}", rank(), refusal);
    const std::string all = detail::said_by_all(mine, exchange_.name() + "/refused", process_set_);
    if (all.empty()) throw;
    for (std::size_t i = 0; i < pieces_.size(); ++i) tensors[i] = pieces_[i].travels;
    exchange_.broadcast(tensors, "parameters");
    throw Mismatch(error.what() + all);
  }
}

/// Makes parameters and states of each share those of its owner, on all hosts. Returns why this
/// rank could not take these states; empty if it has.
std::string OptimizerShards::equalize_hosts() {
  if (begun_ == 0) return {};  // parameters are each rank's own still
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> values(pieces_.size());
  for (std::size_t i = 0; i < begun_; ++i) values[i] = pieces_[i].travels;
  exchange_.broadcast(values, "parameters");
  const std::string why = state_.spread(shared_->twins());
  if (why.empty()) return {};
  return formatted(
      "the hosts have different states of the optimizer since a step has failed ({}); make the "
      "optimizer anew on all ranks, or clear its state",
      why);
}

void OptimizerShards::give_back() {
  const at::NoGradGuard no_gradient;
  const auto masters = state_.gather_masters();
  wrapped_.state() = state_.gather();
  given_back_ = true;
  if (masters_ != nullptr) masters_->adopt(masters);
}

std::function<void()> OptimizerShards::remember_masters() {
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const auto& piece : pieces_)
    if (piece.master) before.emplace_back(piece.master->tensor(), piece.master->tensor().clone());
  return [before = std::move(before)] {
    for (const auto& [master, then] : before) at::Tensor(master).copy_(then);
  };
}

void OptimizerShards::save(torch::serialize::OutputArchive& archive, std::optional<int> only) {
  const at::NoGradGuard no_gradient;
  const auto masters = state_.gather_masters(only);
  detail::ShardedState::States whole = state_.gather(only);
  if (!detail::PieceExchange::gets_whole(only)) return;
  std::swap(wrapped_.state(), whole);
  const auto share_back = c10::make_scope_exit([&] { std::swap(wrapped_.state(), whole); });
  if (masters_ == nullptr) return wrapped_.save(archive);
  detail::MasterCopies::write(archive, wrapped_, masters);
  const detail::RepeatedParameters each_once(wrapped_, detail::RepeatedParameters::Places::LeftOut);
  wrapped_.save(archive);
}

void OptimizerShards::load(const std::function<void()>& load_wrapped,
                           torch::serialize::InputArchive& archive,
                           detail::CheckpointReader* reader) {
  const at::NoGradGuard no_gradient;
  detail::MasterCopies::Masters masters;
  if (masters_ != nullptr) masters = detail::MasterCopies::read(archive, wrapped_);
  detail::ShardedState::States before = std::exchange(wrapped_.state(), {});
  try {
    load_wrapped();
    state_.keep(std::exchange(wrapped_.state(), {}), reader);
    mark();
  } catch (...) {
    wrapped_.state() = std::move(before);
    throw;
  }
  stepped_ = true;
  for (auto& piece : pieces_)
    if (const auto whole = masters.find(piece.parameter.unsafeGetTensorImpl());
        piece.master && whole != masters.end())
      piece.master->load(whole->second);
}

}  // namespace hvd
