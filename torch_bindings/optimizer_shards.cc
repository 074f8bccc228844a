#include "torch_bindings/optimizer_shards.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "hvd/text.h"
#include "torch_bindings/agreement.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/repeated_parameters.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

/// Elements; cuts are at multiples of it, so that pieces stay aligned to cache lines.
constexpr std::int64_t kGrain = 64;

/// What a state has for each element of its parameter, and what it has once.
struct StateParts {
  std::vector<at::Tensor*> tensors;
  std::int64_t* step = nullptr;
};
StateParts parts_of(OptimizerParamState& state) {
  using namespace torch::optim;
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) return {{&sgd->momentum_buffer()}, nullptr};
  if (auto* adam = dynamic_cast<AdamParamState*>(&state))
    return {{&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()}, &adam->step()};
  if (auto* adamw = dynamic_cast<AdamWParamState*>(&state))
    return {{&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()}, &adamw->step()};
  if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state))
    return {{&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()}, &rmsprop->step()};
  if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) return {{&adagrad->sum()}, &adagrad->step()};
  return {};
}

/// An empty state of the kind that the optimizer keeps; null if LibTorch does not know it.
std::unique_ptr<OptimizerParamState> fresh_state(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) return std::make_unique<SGDParamState>();
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr) return std::make_unique<AdamParamState>();
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) return std::make_unique<AdamWParamState>();
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) return std::make_unique<RMSpropParamState>();
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) return std::make_unique<AdagradParamState>();
  return nullptr;
}

at::Tensor flat(const at::Tensor& dense) { return detail::in_memory_order(dense.detach()); }

/// The elements of `tensor` in the order of the memory of `parameter`.
at::Tensor flat_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.is_sparse()) return flat_like(tensor.to_dense(), parameter);
  if (tensor.strides() == parameter.strides()) return flat(tensor);
  return flat(at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options().requires_grad(false)).copy_(tensor));
}

std::size_t bytes_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()) * tensor.element_size(); }

/// Nobody but the parameter refers to its memory, and it has all of it.
bool may_move(const at::Tensor& parameter) {
  return parameter.is_cpu() && parameter.numel() > 0 && parameter.is_non_overlapping_and_dense() && parameter.storage().use_count() == 1 &&
         parameter.storage().nbytes() == bytes_of(parameter);
}

/// Those whose groups a wrapper shares out at present.
struct SharedOut {
  std::mutex mutex;
  std::set<const Optimizer*> optimizers;
};
std::shared_ptr<SharedOut> shared_out() {
  static const auto all = std::make_shared<SharedOut>();
  return all;
}

/// A state that no optimizer of LibTorch makes, and none can step with.
bool is_left_over(OptimizerParamState& state) {
  const StateParts parts = parts_of(state);
  return !parts.tensors.empty() && !parts.tensors.front()->defined();
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
    if (state && is_left_over(*state))
      throw InvalidArgument(
          "the state of this optimizer was in shares when the DistributedOptimizer around it ended, and is not whole; call unshard() on "
          "all "
          "ranks before that, or make the optimizer anew (or clear its state()) to start without a state");
}

OptimizerShards::OptimizerShards(Optimizer& wrapped, const ProcessSet& process_set, std::string name, const Named& parameters)
    : wrapped_(wrapped),
      process_set_(process_set),
      ranks_(process_set.ranks()),
      self_(static_cast<std::size_t>(process_set.rank())),
      name_(std::move(name)),
      is_known_(fresh_state(wrapped) != nullptr),
      stepped_(!wrapped.state().empty()) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&wrapped) != nullptr)
    throw InvalidArgument("shard_optimizer_state: LBFGS looks at all parameters at once, so its state cannot be shared out");
  add(parameters, 0);
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
  if (given_back_ || !is_known_) return;
  const bool had_state = has_state();
  for (const auto& piece : pieces_) wrapped_.state().erase(piece.tensor.unsafeGetTensorImpl());
  if (!had_state) return;
  for (const auto& piece : pieces_) wrapped_.state()[piece.parameter.unsafeGetTensorImpl()] = fresh_state(wrapped_);
}

/// Whether any rank has a state, as far as all of them can tell alike.
bool OptimizerShards::has_state() const {
  if (dynamic_cast<const torch::optim::SGD*>(&wrapped_) == nullptr) return stepped_;
  const auto& groups = std::as_const(wrapped_).param_groups();
  return stepped_ && std::any_of(groups.begin(), groups.end(), [](const auto& group) {
           return static_cast<const torch::optim::SGDOptions&>(group.options()).momentum() != 0;
         });
}

void OptimizerShards::add(const Named& parameters, std::size_t first) {
  const at::NoGradGuard no_gradient;
  const std::span added = std::span(parameters).subspan(first);
  move_into_shared_memory(added);
  States states;  // of the new ones, whole
  for (const auto& [name, parameter] : added) {
    const auto found = wrapped_.state().find(parameter.unsafeGetTensorImpl());
    if (found == wrapped_.state().end()) continue;
    states[found->first] = std::move(found->second);
    wrapped_.state().erase(found);
  }
  auto pieces = cut(added);
  for (auto& piece : pieces) {
    piece.travels = view_of(piece);
    piece.strides = piece.parameter.strides().vec();
    piece.tensor = is_known_ ? piece.travels.detach() : piece.parameter;
    if (is_known_ && piece.is_whole()) piece.tensor = piece.parameter.detach();
  }
  pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  keep_share(std::move(states));
  arrange();
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

void OptimizerShards::move_into_shared_memory(std::span<const std::pair<std::string, at::Tensor>> parameters) const {
  std::size_t bytes = 0;
  for (const auto& [name, parameter] : parameters)
    if (may_move(parameter)) bytes += aligned_to_member(bytes_of(parameter));
  if (bytes == 0 || ranks_.size() == 1) return;
  const auto memory = allocate_shared(bytes);
  if (!memory) return;
  std::size_t offset = 0;
  for (const auto& [name, parameter] : parameters) {
    if (!may_move(parameter)) continue;
    const at::Tensor moved = detail::view_of(memory, offset, parameter, parameter.scalar_type());
    offset += aligned_to_member(bytes_of(parameter));
    moved.copy_(parameter);
    at::Tensor(parameter).set_data(moved);
  }
}

/// Whole parameters, the largest first, each to who has least.
void OptimizerShards::deal(std::vector<Piece>& whole) const {
  std::vector<std::size_t> order(whole.size()), loads(ranks_.size(), 0);
  for (const auto& piece : pieces_) loads[piece.owner] += bytes_of(piece.parameter);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return bytes_of(whole[a].parameter) > bytes_of(whole[b].parameter); });
  for (const auto index : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    whole[index].owner = static_cast<std::size_t>(least - loads.begin());
    *least += bytes_of(whole[index].parameter);
  }
}

std::vector<OptimizerShards::Piece> OptimizerShards::cut(std::span<const std::pair<std::string, at::Tensor>> parameters) const {
  const std::size_t ranks = ranks_.size();
  std::size_t total = 0;
  std::vector<Piece> whole, pieces;
  for (const auto& [name, parameter] : parameters) {
    total += bytes_of(parameter);
    whole.push_back({name, parameter, 0, parameter.numel(), 0, {}, {}, {}});
  }
  if (!is_known_) {
    deal(whole);
    return whole;
  }
  std::vector<std::size_t> loads(ranks, 0);  // of what was cut before: who has least comes first
  for (const auto& piece : pieces_) loads[piece.owner] += bytes_of(piece.travels);
  const auto first = static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
  const auto end_of = [&](std::size_t turn) { return total / ranks * (turn + 1) + total % ranks * (turn + 1) / ranks; };
  std::size_t turn = 0, dealt = 0;
  for (auto piece : whole) {
    const auto size = static_cast<std::int64_t>(piece.parameter.element_size());
    const std::int64_t elements = piece.end;
    do {
      while (turn + 1 < ranks && dealt >= end_of(turn)) ++turn;
      const auto room = static_cast<std::int64_t>(end_of(turn) - std::min(dealt, end_of(turn)));
      const std::int64_t wanted = (room / size + kGrain - 1) / kGrain * kGrain;
      const bool all = turn + 1 == ranks || !piece.parameter.is_non_overlapping_and_dense() || wanted + kGrain >= elements - piece.begin;
      piece.end = all ? elements : piece.begin + std::max(wanted, kGrain);
      piece.owner = (first + turn) % ranks;
      pieces.push_back(piece);
      dealt += static_cast<std::size_t>((piece.end - piece.begin) * size);
      piece.begin = piece.end;
    } while (piece.begin < elements);
  }
  return pieces;
}

at::Tensor OptimizerShards::view_of(const Piece& piece) const {
  if (!piece.parameter.is_non_overlapping_and_dense()) return piece.parameter.detach();
  return flat(piece.parameter).slice(0, piece.begin, piece.end);
}

/// A parameter may have got other memory since, as torch::load gives it.
void OptimizerShards::follow_memory() {
  for (auto& piece : pieces_) {
    const at::Tensor now = view_of(piece);
    if (now.const_data_ptr() == piece.travels.const_data_ptr()) continue;
    if (piece.parameter.strides() != at::IntArrayRef(piece.strides) || !piece.parameter.options().type_equal(piece.travels.options()))
      throw InvalidArgument(
          formatted("shard_optimizer_state: parameter '{}' has another layout, type or device than when its optimizer was wrapped; change "
                    "the model first and wrap the optimizer then",
                    piece.name));
    piece.travels = now;
    if (is_known_) piece.tensor.set_data(piece.is_whole() ? piece.parameter.detach() : now.detach());
  }
}

/// This rank's pieces stand where their parameters do.
void OptimizerShards::arrange() {
  std::unordered_map<const void*, std::vector<at::Tensor>> mine;
  for (const auto& piece : pieces_)
    if (is_mine(piece)) mine[piece.parameter.unsafeGetTensorImpl()].push_back(piece.tensor);
  shares_.clear();
  for (const auto& group : wrapped_.param_groups()) {
    auto& share = shares_.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = mine.find(parameter.unsafeGetTensorImpl());
      if (found != mine.end()) share.insert(share.end(), found->second.begin(), found->second.end());
    }
  }
}

void OptimizerShards::lend() {
  if (std::exchange(lent_, true)) return;
  const at::NoGradGuard no_gradient;
  for (std::size_t g = 0; g < shares_.size(); ++g) std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  stepped_ = true;
  follow_memory();
  for (auto& piece : pieces_) {
    if (!is_mine(piece) || piece.tensor.is_same(piece.parameter)) continue;
    const at::Tensor& gradient = piece.parameter.grad();
    piece.tensor.mutable_grad() =
        !gradient.defined() || piece.is_whole() ? gradient : flat_like(gradient, piece.parameter).slice(0, piece.begin, piece.end);
  }
}

void OptimizerShards::take_back() {
  if (!std::exchange(lent_, false)) return;
  for (std::size_t g = 0; g < shares_.size(); ++g) std::swap(wrapped_.param_groups()[g].params(), shares_[g]);
  for (auto& piece : pieces_)
    if (is_mine(piece) && !piece.tensor.is_same(piece.parameter)) piece.tensor.mutable_grad().reset();
}

void OptimizerShards::share_parameters(const std::string& refusal) {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> tensors;
  for (auto& piece : pieces_) tensors.push_back(refusal.empty() ? piece.travels : piece.travels.unsqueeze(0));  // which is a Mismatch
  try {
    broadcast_pieces(tensors, "parameters");
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
  if (ranks_.size() == 1) return;
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
                                         {.name = formatted("{}/{} of rank {} on {}", name_, what, ranks_[key.first], key.second),
                                          .root_rank = ranks_[key.first],
                                          .process_set = process_set_}));
  for (const auto& handle : handles) handle.wait();
}

OptimizerShards::States OptimizerShards::gather_state() {
  if (!fresh_state(wrapped_))
    throw InvalidArgument("shard_optimizer_state: LibTorch does not know this optimizer, so its state cannot be put together to be saved");
  // What there is of each piece: whether it has a state, which tensors that has, and its step.
  at::Tensor known = at::zeros({static_cast<std::int64_t>(pieces_.size()), 3}, at::kLong);
  auto word = known.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const auto found = wrapped_.state().find(pieces_[i].tensor.unsafeGetTensorImpl());
    if (!is_mine(pieces_[i]) || found == wrapped_.state().end()) continue;
    const auto row = static_cast<std::int64_t>(i);
    const StateParts parts = parts_of(*found->second);
    word[row][0] = 1;
    for (std::size_t t = 0; t < parts.tensors.size(); ++t)
      if (parts.tensors[t]->defined()) word[row][1] |= std::int64_t{1} << t;
    if (parts.step != nullptr) word[row][2] = *parts.step;
  }
  allreduce_(known, {.name = name_ + "/state", .op = ReduceOp::Sum, .process_set = process_set_});
  States whole;
  const std::size_t fields = parts_of(*fresh_state(wrapped_)).tensors.size();
  for (std::size_t t = 0; t < fields; ++t) {
    std::vector<at::Tensor> tensors(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      const auto row = static_cast<std::int64_t>(i);
      if (word[row][0] == 0) continue;
      const at::Tensor& parameter = piece.parameter;
      auto& state = whole[parameter.unsafeGetTensorImpl()];
      if (!state) state = fresh_state(wrapped_);
      const StateParts parts = parts_of(*state);
      if (parts.step != nullptr) *parts.step = word[row][2];
      if ((word[row][1] >> t & 1) == 0) continue;
      at::Tensor& all = *parts.tensors[t];
      if (!all.defined()) all = at::zeros_like(parameter, parameter.options().requires_grad(false));
      const bool cut = !piece.is_whole();
      tensors[i] = cut ? flat(all).slice(0, piece.begin, piece.end) : all;
      if (!is_mine(piece)) continue;
      const at::Tensor& own = *parts_of(*wrapped_.state().at(piece.tensor.unsafeGetTensorImpl())).tensors[t];
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
      states[piece.tensor.unsafeGetTensorImpl()] = std::move(found->second);
      continue;
    }
    auto state = fresh_state(wrapped_);
    const StateParts from = parts_of(*found->second);
    const StateParts to = parts_of(*state);
    if (to.step != nullptr) *to.step = *from.step;
    for (std::size_t t = 0; t < to.tensors.size(); ++t)
      if (from.tensors[t]->defined())
        *to.tensors[t] = flat_like(*from.tensors[t], piece.parameter).slice(0, piece.begin, piece.end).clone();
    states[piece.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

void OptimizerShards::give_back() {
  const at::NoGradGuard no_gradient;
  if (is_known_) {
    wrapped_.state() = gather_state();
  } else {
    at::Tensor states = at::full({1}, static_cast<std::int64_t>(wrapped_.state().size()), at::kLong);
    allreduce_(states, {.name = name_ + "/states", .op = ReduceOp::Max, .process_set = process_set_});
    if (states.item<std::int64_t>() > 0)
      throw InvalidArgument("unshard(): LibTorch does not know this optimizer, so its state, which is in shares, cannot be put together");
  }
  given_back_ = true;
}

void OptimizerShards::save(torch::serialize::OutputArchive& archive) {
  const at::NoGradGuard no_gradient;
  struct Undone {  // whatever happens, the share comes back
    OptimizerShards& self;
    States share;
    ~Undone() { self.wrapped_.state() = std::move(share); }
  };
  States whole = gather_state();
  const Undone undone{*this, std::exchange(wrapped_.state(), std::move(whole))};
  wrapped_.save(archive);
}

void OptimizerShards::load(torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_gradient;
  States before = std::exchange(wrapped_.state(), {});
  try {
    detail::load_state(wrapped_, archive);
  } catch (...) {
    wrapped_.state() = std::move(before);
    throw;
  }
  stepped_ = true;
  keep_share(std::exchange(wrapped_.state(), {}));
}

}  // namespace hvd
