// The state of an optimizer that OptimizerShards has shared out: put together, dealt, written and read.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/files/checkpoint_reader.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/precision/state_parts.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd {

namespace {

/// Bytes that a rank sends at once of what one rank alone gets.
constexpr std::int64_t kPortionBytes = std::int64_t{1} << 20;

}  // namespace

OptimizerShards::States OptimizerShards::gather_state(std::optional<int> only) {
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
  if (pieces_.empty() || known.select(1, 0).max().item<std::int64_t>() < 2) return gather_parts(known, only);
  throw InvalidArgument(
      "shard_optimizer_state: the optimizer keeps states of a type of its own, which derives from one of LibTorch's; what that has besides "
      "cannot be put together");
}

/// Whether this rank is to have what is put together.
bool OptimizerShards::gets_whole(std::optional<int> only) const { return !only || *only == hvd::rank(); }

/// `known`: what there is of each piece on its owner.
OptimizerShards::States OptimizerShards::gather_parts(const at::Tensor& known, std::optional<int> only) {
  const auto word = known.accessor<std::int64_t, 2>();
  States whole;
  const std::size_t fields = detail::parts_of(*detail::fresh_state(wrapped_)).tensors.size();
  for (std::size_t t = 0; t < fields; ++t) {
    std::vector<at::Tensor> tensors(pieces_.size()), own(pieces_.size());
    std::vector<std::int64_t> bytes(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      const auto row = static_cast<std::int64_t>(i);
      if (word[row][0] == 0) continue;
      const bool has = (word[row][1] >> t & 1) != 0;
      if (has && is_mine(piece)) own[i] = *detail::parts_of(*wrapped_.state().at(piece.tensor.unsafeGetTensorImpl())).tensors[t];
      if (has) bytes[i] = bytes_of_state(piece);
      if (!gets_whole(only)) continue;
      const at::Tensor& parameter = piece.parameter;
      auto& state = whole[parameter.unsafeGetTensorImpl()];
      if (!state) state = detail::fresh_state(wrapped_);
      const detail::StateParts parts = detail::parts_of(*state);
      if (parts.step != nullptr) *parts.step = word[row][2];
      if (!has) continue;
      at::Tensor& all = *parts.tensors[t];
      if (!all.defined()) all = at::zeros_like(parameter, parameter.options().requires_grad(false).dtype(state_type(piece)));
      tensors[i] = piece.is_whole() ? all : detail::in_memory_order(all).slice(0, piece.begin, piece.end);
    }
    gather_pieces(tensors, own, bytes, formatted("state {}", t), only);
  }
  return whole;
}

/// `own` of each piece goes from its owner into `whole`: on every rank, or on `only` one. There it comes in portions, as bytes in the order
/// of the pieces, so that the other ranks need no memory to speak of.
void OptimizerShards::gather_pieces(const std::vector<at::Tensor>& whole, const std::vector<at::Tensor>& own,
                                    const std::vector<std::int64_t>& bytes, const std::string& what, std::optional<int> only) const {
  if (!only || process_set_.size() == 1) {
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (own[i].defined() && whole[i].defined()) whole[i].copy_(own[i]);
    return broadcast_pieces(whole, what);
  }
  const auto ranks = process_set_.ranks();
  const auto root = std::find(ranks.begin(), ranks.end(), *only);
  if (root == ranks.end()) return;
  const auto in_bytes = [](const at::Tensor& tensor) { return detail::in_memory_order(tensor).view(at::kByte); };
  // Calls `part(piece, first, count)` for the bytes from `at` on that the owner of a share sends at once.
  const auto for_each_part = [&](int sender, std::int64_t at, const auto& part) {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (owners_[pieces_[i].owner] != sender) continue;
      const std::int64_t begin = std::max<std::int64_t>(0, at), end = std::min(bytes[i], at + kPortionBytes);
      if (begin < end) part(i, begin, end - begin);
      at -= bytes[i];
    }
  };
  std::map<int, std::int64_t> all;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    all[owners_[pieces_[i].owner]] += bytes[i];
    if (gets_whole(only) && owners_[pieces_[i].owner] == *only && own[i].defined()) whole[i].copy_(own[i]);
  }
  all.erase(*only);
  std::int64_t most = 0;
  for (const auto& [sender, count] : all) most = std::max(most, count);
  std::optional<std::size_t> current;  // the piece whose bytes these are: what has to be turned is turned once, not for each portion
  at::Tensor current_bytes;
  const auto bytes_to_send = [&](std::size_t i) -> const at::Tensor& {
    if (current == i) return current_bytes;
    const Piece& piece = pieces_[i];
    const at::Tensor typed = own[i].to(state_type(piece));
    const bool is_turned = piece.is_whole() && typed.sizes() == piece.parameter.sizes();  // it may lie in another order than `whole`
    const at::Tensor like = is_turned ? at::empty_like(piece.parameter, typed.options().requires_grad(false)) : at::Tensor();
    current = i;
    return current_bytes = (is_turned ? detail::in_memory_order_of(typed, like) : detail::in_memory_order(typed)).view(at::kByte);
  };
  for (std::int64_t at = 0; at < most; at += kPortionBytes) {
    std::vector<at::Tensor> parts{torch::empty({0}, torch::kUInt8)};
    if (!gets_whole(only))
      for_each_part(hvd::rank(), at, [&](std::size_t i, std::int64_t first, std::int64_t count) {
        parts.push_back(bytes_to_send(i).narrow(0, first, count).cpu());
      });
    const at::Tensor mine = torch::cat(parts);
    const at::Tensor splits = torch::zeros({process_set_.size()}, torch::kInt64);
    splits[root - ranks.begin()] = mine.numel();
    const at::Tensor received =
        alltoall(mine, {.name = formatted("{}/{} to rank {}", name_, what, *only), .splits = splits, .process_set = process_set_}).output;
    std::int64_t place = 0;
    for (const int sender : gets_whole(only) ? ranks : std::vector<int>{})
      if (sender != *only)
        for_each_part(sender, at, [&](std::size_t i, std::int64_t first, std::int64_t count) {
          in_bytes(whole[i]).narrow(0, first, count).copy_(received.narrow(0, place, count));
          place += count;
        });
  }
}

/// The wrapped optimizer's state gets this rank's share of `whole`, which is by parameter.
void OptimizerShards::keep_share(States whole, detail::CheckpointReader* reader) {
  auto& states = wrapped_.state();
  for (const auto& piece : pieces_) {
    const auto found = whole.find(piece.parameter.unsafeGetTensorImpl());
    if (!is_mine(piece) || found == whole.end()) continue;
    for (const at::Tensor* const tensor : detail::parts_of(*found->second).tensors)
      if (tensor->defined() && tensor->sizes() != piece.parameter.sizes())
        throw InvalidArgument(formatted("the state of parameter '{}' has shape {}, and the parameter {}", piece.name,
                                        to_string(tensor->sizes().vec()), to_string(piece.parameter.sizes().vec())));
    if (piece.is_whole()) {
      for (at::Tensor* const tensor : detail::parts_of(*found->second).tensors) {
        if (reader != nullptr) reader->want(*tensor);
        if (has_master(piece) && tensor->defined()) *tensor = tensor->to(at::kFloat);
      }
      states[piece.tensor.unsafeGetTensorImpl()] = std::move(found->second);
      continue;
    }
    auto state = detail::fresh_state(wrapped_);
    const detail::StateParts from = detail::parts_of(*found->second);
    const detail::StateParts to = detail::parts_of(*state);
    if (to.step != nullptr) *to.step = *from.step;
    for (std::size_t t = 0; t < to.tensors.size(); ++t)
      if (from.tensors[t]->defined()) *to.tensors[t] = part_of(*from.tensors[t], piece, reader);
    states[piece.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

/// The elements of the piece, in the order of the parameter's memory, in memory of their own.
at::Tensor OptimizerShards::part_of(const at::Tensor& whole, const Piece& piece, detail::CheckpointReader* reader) const {
  if (reader == nullptr || !reader->is_unread(whole))
    return detail::in_memory_order_of(whole, piece.parameter)
        .slice(0, piece.begin, piece.end)
        .to(has_master(piece) ? at::kFloat : whole.scalar_type(), false, /*copy=*/true);
  if (whole.strides() != piece.parameter.strides()) {  // it comes in an order of its own, and so as a whole
    const at::Tensor ordered = at::empty_strided(piece.parameter.sizes(), piece.parameter.strides(), whole.options());
    reader->want(ordered, whole);
    return detail::in_memory_order(ordered).slice(0, piece.begin, piece.end);
  }
  const at::Tensor part = torch::empty({piece.end - piece.begin}, whole.options());
  reader->want(part, detail::in_memory_order(whole).slice(0, piece.begin, piece.end));
  return part;
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

/// Collective: all masters, whole.
detail::MasterCopies::Masters OptimizerShards::gather_masters(std::optional<int> only) const {
  detail::MasterCopies::Masters all;
  std::vector<at::Tensor> tensors(pieces_.size()), own(pieces_.size());
  std::vector<std::int64_t> bytes(pieces_.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (!has_master(piece)) continue;
    bytes[i] = bytes_of_state(piece);
    if (piece.master) own[i] = piece.master->tensor();
    if (!gets_whole(only)) continue;
    at::Tensor& whole = all[piece.parameter.unsafeGetTensorImpl()];
    if (!whole.defined()) whole = at::zeros_like(piece.parameter, piece.parameter.options().requires_grad(false).dtype(at::kFloat));
    tensors[i] = piece.is_whole() ? whole : detail::in_memory_order(whole).slice(0, piece.begin, piece.end);
  }
  gather_pieces(tensors, own, bytes, "masters", only);
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

void OptimizerShards::save(torch::serialize::OutputArchive& archive, std::optional<int> only) {
  const at::NoGradGuard no_gradient;
  struct Undone {  // whatever happens, the share comes back
    OptimizerShards& self;
    States share;
    ~Undone() { self.wrapped_.state() = std::move(share); }
  };
  const auto masters = gather_masters(only);
  States whole = gather_state(only);
  if (!gets_whole(only)) return;
  const Undone undone{*this, std::exchange(wrapped_.state(), std::move(whole))};
  if (masters_ == nullptr) return wrapped_.save(archive);
  detail::MasterCopies::write(archive, wrapped_, masters);
  const detail::RepeatedParameters each_once(wrapped_, detail::RepeatedParameters::Places::LeftOut);
  wrapped_.save(archive);
}

void OptimizerShards::load(const std::function<void()>& load_wrapped, torch::serialize::InputArchive& archive,
                           detail::CheckpointReader* reader) {
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
  keep_share(std::exchange(wrapped_.state(), {}), reader);
  mark();
  for (auto& piece : pieces_)
    if (const auto whole = masters.find(piece.parameter.unsafeGetTensorImpl()); piece.master && whole != masters.end())
      piece.master->load(whole->second);
}

}  // namespace hvd
