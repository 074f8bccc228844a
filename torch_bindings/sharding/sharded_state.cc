#include "torch_bindings/sharding/sharded_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/files/checkpoint_reader.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd::detail {

namespace {

using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive, torch::serialize::OutputArchive;

constexpr auto kUnknown =
    "shard_optimizer_state: LibTorch does not know this optimizer, so its state is put together by "
    "serialize and clone of the states";

InputArchive written(const OptimizerParamState& state) {
  OutputArchive archive;
  state.serialize(archive);
  return as_input(archive);
}

/// Returns a copy of the model that has read `archive`; null where it is not what was written
/// there, or the model has changed with it, which is then again what it was.
std::unique_ptr<OptimizerParamState> read_into_copy(InputArchive& archive,
                                                    OptimizerParamState& model) {
  InputArchive before = written(model);
  auto state = model.clone();
  try {
    state->serialize(archive);
  } catch (...) {
    model.serialize(before);
    throw;
  }
  InputArchive now = written(*state), model_now = written(model);
  if (same_archive(archive, now) && same_archive(before, model_now)) return state;
  model.serialize(before);
  return nullptr;
}

}  // namespace

ShardedState::States ShardedState::gather(std::optional<int> only) const {
  if (!fresh_state(wrapped_)) return gather_unknown(only);
  // What there is of each piece: whether it has a state, which tensors that has, and its step.
  at::Tensor known = at::zeros({static_cast<std::int64_t>(pieces_.size()), 3}, at::kLong);
  auto word = known.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    auto* const state = exchange_.owns(pieces_[i]) ? state_of(pieces_[i]) : nullptr;
    if (state == nullptr) continue;
    const auto row = static_cast<std::int64_t>(i);
    const StateParts parts = parts_of(*state);
    word[row][0] = is_all_parts(*state) ? 1 : 2;
    for (std::size_t t = 0; t < parts.tensors.size(); ++t)
      if (parts.tensors[t]->defined()) word[row][1] |= std::int64_t{1} << t;
    if (parts.step != nullptr) word[row][2] = *parts.step;
  }
  // Zeros but from the owner.
  allreduce_(known, {.name = exchange_.name() + "/state",
                     .op = ReduceOp::Max,
                     .process_set = exchange_.process_set()});
  if (pieces_.empty() || known.select(1, 0).max().item<std::int64_t>() < 2)
    return gather_parts(known, only);
  throw InvalidArgument(
      "shard_optimizer_state: the optimizer keeps states of a type of its own, which derives from "
      "one of LibTorch's; what that has besides cannot be put together");
}

/// Puts together the states of an optimizer that LibTorch does not know: they travel as they write
/// themselves, and are read into copies of one that this rank has.
ShardedState::States ShardedState::gather_unknown(std::optional<int> only) const {
  OutputArchive mine;
  OptimizerParamState* const model = own_model();
  std::string failure;
  try {
    if (model != nullptr) static_cast<void>(model->clone());
    write_own(mine);
  } catch (...) {
    failure = formatted("{}: {}", kUnknown, words_of_current_exception());
  }
  const auto ranks = exchange_.process_set().ranks();
  const auto texts = allgather_text(model != nullptr ? text_of(mine) : std::string(),
                                    exchange_.process_set(), failure);
  const bool is_there =
      std::any_of(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
  for (std::size_t i = 0; is_there && i < texts.size(); ++i)
    if (texts[i].empty() && (!only || *only == ranks[i]))
      throw InvalidArgument(formatted("{}: rank {} has a share without one, and so nothing to copy",
                                      kUnknown, ranks[i]));
  States whole;
  if (!PieceExchange::gets_whole(only)) return whole;
  for (const auto& text : texts) {
    if (text.empty()) continue;
    InputArchive archive = archive_of(text, pieces_.front().parameter.device());
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (auto state = read_own(archive, i))
        whole[pieces_[i].parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  return whole;
}

/// Puts the states together. `known`: what there is of each piece on its owner.
ShardedState::States ShardedState::gather_parts(const at::Tensor& known,
                                                std::optional<int> only) const {
  const auto word = known.accessor<std::int64_t, 2>();
  States whole;
  const std::size_t fields = parts_of(*fresh_state(wrapped_)).tensors.size();
  for (std::size_t t = 0; t < fields; ++t) {
    std::vector<at::Tensor> tensors(pieces_.size()), own(pieces_.size());
    std::vector<std::int64_t> bytes(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const ShardPiece& piece = pieces_[i];
      const auto row = static_cast<std::int64_t>(i);
      if (word[row][0] == 0) continue;
      const bool has = (word[row][1] >> t & 1) != 0;
      if (has && exchange_.owns(piece)) own[i] = *parts_of(*state_of(piece)).tensors[t];
      if (has) bytes[i] = piece.state_bytes();
      if (!PieceExchange::gets_whole(only)) continue;
      const at::Tensor& parameter = piece.parameter;
      auto& state = whole[parameter.unsafeGetTensorImpl()];
      if (!state) state = fresh_state(wrapped_);
      const StateParts parts = parts_of(*state);
      if (parts.step != nullptr) *parts.step = word[row][2];
      if (!has) continue;
      at::Tensor& all = *parts.tensors[t];
      if (!all.defined())
        all = at::zeros_like(parameter,
                             parameter.options().requires_grad(false).dtype(piece.state_type()));
      tensors[i] = piece.is_whole() ? all : in_memory_order(all).slice(0, piece.begin, piece.end);
    }
    exchange_.gather(tensors, own, bytes, formatted("state {}", t), only);
  }
  return whole;
}

/// Returns the state that this rank has of the piece; null if it has none.
OptimizerParamState* ShardedState::state_of(const ShardPiece& piece) const {
  const auto found = wrapped_.state().find(piece.tensor.unsafeGetTensorImpl());
  return found == wrapped_.state().end() ? nullptr : found->second.get();
}

/// Returns any that it has, of its own pieces.
OptimizerParamState* ShardedState::own_model() const {
  for (const auto& piece : pieces_)
    if (auto* const state = piece.is_mine ? state_of(piece) : nullptr) return state;
  return nullptr;
}

/// Writes the states of the pieces that come from this rank.
void ShardedState::write_own(OutputArchive& archive) const {
  const bool is_known = fresh_state(wrapped_) != nullptr;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const OptimizerParamState* const state = state_of(pieces_[i]);
    if (!exchange_.owns(pieces_[i]) || state == nullptr) continue;
    OutputArchive one(archive.compilation_unit());
    state->serialize(one);
    archive.write(formatted("{}/{}", is_known && is_all_parts(*state) ? "parts" : "own", i), one);
  }
}

/// Returns the state that was written for the piece; null if none was.
std::unique_ptr<OptimizerParamState> ShardedState::read_own(InputArchive& archive,
                                                            std::size_t piece) const {
  InputArchive one;
  if (archive.try_read(formatted("parts/{}", piece), one)) {
    auto state = fresh_state(wrapped_);
    state->serialize(one);
    return state;
  }
  if (!archive.try_read(formatted("own/{}", piece), one)) return nullptr;
  OptimizerParamState* const model = own_model();
  if (model == nullptr)
    throw InvalidArgument(
        formatted("{}: rank {} has none, and so nothing to copy", kUnknown, hvd::rank()));
  if (auto state = read_into_copy(one, *model)) return state;
  throw InvalidArgument(
      formatted("{}, and serialize does not read what it writes, or reads it into tensors that "
                "copies share (read a c10::IValue, and take the tensor from it)",
                kUnknown));
}

/// Returns what twins are to have, or why they cannot.
std::string ShardedState::written_for_twins() const {
  try {
    OutputArchive mine;
    write_own(mine);
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (pieces_[i].master) mine.write(formatted("master/{}", i), pieces_[i].master->tensor());
    return text_of(mine);
  } catch (...) {
    OutputArchive failed;
    failed.write("failure", c10::IValue(words_of_current_exception()));
    return text_of(failed);
  }
}

std::string ShardedState::spread(const std::vector<int>& twins) const {
  const std::string text = exchange_.to_twins(twins.empty() ? "" : written_for_twins(), twins);
  if (text.empty()) return {};
  try {
    InputArchive theirs = archive_of(text, std::nullopt);
    c10::IValue failure;
    if (theirs.try_read("failure", failure)) return failure.toStringRef();
    States states;
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (pieces_[i].is_mine) states[pieces_[i].tensor.unsafeGetTensorImpl()] = read_own(theirs, i);
    for (auto& [key, state] : states) {
      wrapped_.state().erase(key);
      if (state) wrapped_.state()[key] = std::move(state);
    }
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      at::Tensor master;
      if (!pieces_[i].master) continue;
      theirs.read(formatted("master/{}", i), master);
      at::Tensor(pieces_[i].master->tensor()).copy_(master);
    }
    return {};
  } catch (...) {
    return words_of_current_exception();
  }
}

void ShardedState::check(OptimizerParamState& state, const std::string& name,
                         const at::Tensor& parameter) {
  for (const at::Tensor* const tensor : parts_of(state).tensors)
    if (tensor->defined() && tensor->sizes() != parameter.sizes())
      throw InvalidArgument(
          formatted("the state of parameter '{}' has shape {}, and the parameter {}", name,
                    to_string(tensor->sizes().vec()), to_string(parameter.sizes().vec())));
}

void ShardedState::keep(States whole, CheckpointReader* reader) const {
  for (const auto& piece : pieces_)
    if (const auto found = whole.find(piece.parameter.unsafeGetTensorImpl());
        found != whole.end() && found->second)
      check(*found->second, piece.name, piece.parameter);
  auto& states = wrapped_.state();
  for (const auto& piece : pieces_) {
    const auto found = whole.find(piece.parameter.unsafeGetTensorImpl());
    if (!piece.is_mine || found == whole.end() || !found->second) continue;
    if (piece.is_whole()) {
      for (at::Tensor* const tensor : parts_of(*found->second).tensors) {
        if (reader != nullptr) reader->want(*tensor);
        if (piece.has_master && tensor->defined()) *tensor = tensor->to(at::kFloat);
      }
      states[piece.tensor.unsafeGetTensorImpl()] = std::move(found->second);
      continue;
    }
    auto state = fresh_state(wrapped_);
    const StateParts from = parts_of(*found->second);
    const StateParts to = parts_of(*state);
    if (to.step != nullptr) *to.step = *from.step;
    for (std::size_t t = 0; t < to.tensors.size(); ++t)
      if (from.tensors[t]->defined()) *to.tensors[t] = part_of(*from.tensors[t], piece, reader);
    states[piece.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

/// Returns the elements of the piece, in the parameter's memory order, in memory of their own.
at::Tensor ShardedState::part_of(const at::Tensor& whole, const ShardPiece& piece,
                                 CheckpointReader* reader) {
  if (reader == nullptr || !reader->is_unread(whole))
    return in_memory_order_of(whole, piece.parameter)
        .slice(0, piece.begin, piece.end)
        .to(piece.has_master ? at::kFloat : whole.scalar_type(), false, /*copy=*/true);
  // it comes in an order of its own, and so as a whole
  if (whole.strides() != piece.parameter.strides()) {
    const at::Tensor ordered =
        at::empty_strided(piece.parameter.sizes(), piece.parameter.strides(), whole.options());
    reader->want(ordered, whole);
    return in_memory_order(ordered).slice(0, piece.begin, piece.end);
  }
  const at::Tensor part = torch::empty({piece.end - piece.begin}, whole.options());
  reader->want(part, in_memory_order(whole).slice(0, piece.begin, piece.end));
  return part;
}

MasterCopies::Masters ShardedState::gather_masters(std::optional<int> only) const {
  MasterCopies::Masters all;
  std::vector<at::Tensor> tensors(pieces_.size()), own(pieces_.size());
  std::vector<std::int64_t> bytes(pieces_.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const ShardPiece& piece = pieces_[i];
    if (!piece.has_master) continue;
    bytes[i] = piece.state_bytes();
    if (piece.master) own[i] = piece.master->tensor();
    if (!PieceExchange::gets_whole(only)) continue;
    at::Tensor& whole = all[piece.parameter.unsafeGetTensorImpl()];
    if (!whole.defined())
      whole = at::zeros_like(piece.parameter,
                             piece.parameter.options().requires_grad(false).dtype(at::kFloat));
    tensors[i] = piece.is_whole() ? whole : in_memory_order(whole).slice(0, piece.begin, piece.end);
  }
  exchange_.gather(tensors, own, bytes, "masters", only);
  return all;
}

}  // namespace hvd::detail
