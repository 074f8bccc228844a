#include "torch_bindings/optimizer_shards.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "hvd/text.h"
#include "torch_bindings/collectives.h"
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

}  // namespace

OptimizerShards::OptimizerShards(Optimizer& wrapped, const ProcessSet& process_set, std::string name)
    : wrapped_(wrapped),
      process_set_(process_set),
      ranks_(process_set.ranks()),
      self_(static_cast<std::size_t>(process_set.rank())),
      name_(std::move(name)) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&wrapped) != nullptr)
    throw InvalidArgument("shard_optimizer_state: LBFGS looks at all parameters at once, so its state cannot be shared out");
  if (!process_set.included()) throw InvalidArgument("shard_optimizer_state: this rank is not in the process set");
  const at::NoGradGuard no_gradient;
  for (const auto& group : wrapped.param_groups()) whole_.push_back(group.params());
  move_into_shared_memory();
  cut(fresh_state(wrapped) != nullptr);
  make_views();
  install();
  keep_share(std::exchange(wrapped_.state(), {}));
}

OptimizerShards::~OptimizerShards() {
  for (const auto& piece : pieces_)
    if (is_mine(piece) && !is_whole(piece)) wrapped_.state().erase(piece.tensor.unsafeGetTensorImpl());
  for (std::size_t g = 0; g < whole_.size(); ++g) wrapped_.param_groups()[g].params() = whole_[g];
}

void OptimizerShards::move_into_shared_memory() {
  std::size_t bytes = 0;
  for (const auto& group : whole_)
    for (const auto& parameter : group)
      if (may_move(parameter)) bytes += aligned_to_member(bytes_of(parameter));
  if (bytes == 0 || ranks_.size() == 1) return;
  const auto memory = allocate_shared(bytes);
  if (!memory) return;
  std::size_t offset = 0;
  for (auto& group : whole_) {
    for (auto& parameter : group) {
      if (!may_move(parameter)) continue;
      const at::Tensor moved = detail::view_of(memory, offset, parameter, parameter.scalar_type());
      offset += aligned_to_member(bytes_of(parameter));
      moved.copy_(parameter);
      parameter.set_data(moved);
    }
  }
}

void OptimizerShards::cut(bool within_parameters) {
  const std::size_t ranks = ranks_.size();
  std::size_t total = 0;
  for (std::size_t g = 0; g < whole_.size(); ++g) {
    for (std::size_t p = 0; p < whole_[g].size(); ++p) {
      total += bytes_of(whole_[g][p]);
      pieces_.push_back({g, p, 0, whole_[g][p].numel(), 0, {}, {}, {}});
    }
  }
  if (!within_parameters) {  // the largest first, each to who has least
    std::vector<std::size_t> order(pieces_.size()), loads(ranks, 0);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
      return bytes_of(parameter_of(pieces_[a])) > bytes_of(parameter_of(pieces_[b]));
    });
    for (const auto index : order) {
      const auto least = std::min_element(loads.begin(), loads.end());
      pieces_[index].owner = static_cast<std::size_t>(least - loads.begin());
      *least += bytes_of(parameter_of(pieces_[index]));
    }
    return;
  }
  const auto end_of = [&](std::size_t owner) { return total / ranks * (owner + 1) + total % ranks * (owner + 1) / ranks; };
  std::size_t owner = 0, dealt = 0;
  for (auto piece : std::exchange(pieces_, {})) {
    const at::Tensor& parameter = parameter_of(piece);
    const auto size = static_cast<std::int64_t>(parameter.element_size());
    const std::int64_t elements = piece.end;
    do {
      while (owner + 1 < ranks && dealt >= end_of(owner)) ++owner;
      const auto room = static_cast<std::int64_t>(end_of(owner) - std::min(dealt, end_of(owner)));
      const std::int64_t wanted = (room / size + kGrain - 1) / kGrain * kGrain;
      const bool all = owner + 1 == ranks || !parameter.is_non_overlapping_and_dense() || wanted + kGrain >= elements - piece.begin;
      piece.end = all ? elements : piece.begin + std::max(wanted, kGrain);
      piece.owner = owner;
      pieces_.push_back(piece);
      dealt += static_cast<std::size_t>((piece.end - piece.begin) * size);
      piece.begin = piece.end;
    } while (piece.begin < elements);
  }
}

bool OptimizerShards::is_whole(const Piece& piece) const { return piece.begin == 0 && piece.end == parameter_of(piece).numel(); }

void OptimizerShards::make_views() {
  for (auto& piece : pieces_) {
    const at::Tensor& parameter = parameter_of(piece);
    piece.travels = view_of(piece);
    piece.strides = parameter.strides().vec();
    piece.tensor = is_whole(piece) ? parameter : piece.travels.detach();
  }
}

at::Tensor OptimizerShards::view_of(const Piece& piece) const {
  const at::Tensor& parameter = parameter_of(piece);
  if (!parameter.is_non_overlapping_and_dense()) return parameter.detach();
  return flat(parameter).slice(0, piece.begin, piece.end);
}

/// A parameter may have got other memory since, as torch::load gives it.
void OptimizerShards::follow_memory() {
  for (auto& piece : pieces_) {
    const at::Tensor now = view_of(piece);
    if (now.const_data_ptr() == piece.travels.const_data_ptr()) continue;
    const at::Tensor& parameter = parameter_of(piece);
    if (parameter.strides() != at::IntArrayRef(piece.strides) || !parameter.options().type_equal(piece.travels.options()))
      throw InvalidArgument(
          formatted("shard_optimizer_state: parameter {} of group {} has another layout, type or device than when its "
                    "optimizer was wrapped; change the model first and wrap the optimizer then",
                    piece.place, piece.group));
    piece.travels = now;
    if (!is_whole(piece)) piece.tensor.set_data(now.detach());
  }
}

/// The wrapped optimizer's groups hold the pieces of this rank.
void OptimizerShards::install() {
  for (auto& group : wrapped_.param_groups()) group.params().clear();
  for (const auto& piece : pieces_)
    if (is_mine(piece)) wrapped_.param_groups()[piece.group].params().push_back(piece.tensor);
}

void OptimizerShards::lend_gradients() {
  const at::NoGradGuard no_gradient;
  follow_memory();
  for (auto& piece : pieces_) {
    if (!is_mine(piece) || is_whole(piece)) continue;
    const at::Tensor& parameter = parameter_of(piece);
    piece.tensor.mutable_grad() =
        parameter.grad().defined() ? flat_like(parameter.grad(), parameter).slice(0, piece.begin, piece.end) : at::Tensor();
  }
}

void OptimizerShards::share_parameters() {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> tensors;
  for (auto& piece : pieces_) {
    if (is_mine(piece) && !is_whole(piece)) piece.tensor.mutable_grad().reset();
    tensors.push_back(piece.travels);
  }
  broadcast_pieces(tensors, "parameters");
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
    names.push_back(formatted("parameter {} of group {}", piece.place, piece.group));
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
      const at::Tensor& parameter = parameter_of(piece);
      auto& state = whole[parameter.unsafeGetTensorImpl()];
      if (!state) state = fresh_state(wrapped_);
      const StateParts parts = parts_of(*state);
      if (parts.step != nullptr) *parts.step = word[row][2];
      if ((word[row][1] >> t & 1) == 0) continue;
      at::Tensor& all = *parts.tensors[t];
      if (!all.defined()) all = at::zeros_like(parameter, parameter.options().requires_grad(false));
      const bool cut = !is_whole(piece);
      tensors[i] = cut ? flat(all).slice(0, piece.begin, piece.end) : all;
      if (!is_mine(piece)) continue;
      const at::Tensor& own = *parts_of(*wrapped_.state().at(piece.tensor.unsafeGetTensorImpl())).tensors[t];
      tensors[i].copy_(own);
    }
    broadcast_pieces(tensors, formatted("state {}", t));
  }
  return whole;
}

/// The wrapped optimizer's state becomes this rank's share of `whole`, which is by parameter.
void OptimizerShards::keep_share(States whole) {
  auto& states = wrapped_.state();
  states.clear();
  for (const auto& piece : pieces_) {
    const auto found = whole.find(parameter_of(piece).unsafeGetTensorImpl());
    if (!is_mine(piece) || found == whole.end()) continue;
    if (is_whole(piece)) {
      states[piece.tensor.unsafeGetTensorImpl()] = std::move(found->second);
      continue;
    }
    auto state = fresh_state(wrapped_);
    const StateParts from = parts_of(*found->second);
    const StateParts to = parts_of(*state);
    if (to.step != nullptr) *to.step = *from.step;
    for (std::size_t t = 0; t < to.tensors.size(); ++t)
      if (from.tensors[t]->defined())
        *to.tensors[t] = flat_like(*from.tensors[t], parameter_of(piece)).slice(0, piece.begin, piece.end).clone();
    states[piece.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

void OptimizerShards::save(torch::serialize::OutputArchive& archive) {
  const at::NoGradGuard no_gradient;
  struct Undone {  // whatever happens, the share comes back
    OptimizerShards& self;
    States share;
    ~Undone() {
      self.install();
      self.wrapped_.state() = std::move(share);
    }
  };
  States whole = gather_state();
  const Undone undone{*this, std::exchange(wrapped_.state(), std::move(whole))};
  for (std::size_t g = 0; g < whole_.size(); ++g) wrapped_.param_groups()[g].params() = whole_[g];
  wrapped_.save(archive);
}

void OptimizerShards::load(torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_gradient;
  States before = std::exchange(wrapped_.state(), {});
  for (std::size_t g = 0; g < whole_.size(); ++g) wrapped_.param_groups()[g].params() = whole_[g];
  try {
    wrapped_.load(archive);
  } catch (...) {
    install();
    wrapped_.state() = std::move(before);
    throw;
  }
  install();
  keep_share(std::exchange(wrapped_.state(), {}));
}

}  // namespace hvd
