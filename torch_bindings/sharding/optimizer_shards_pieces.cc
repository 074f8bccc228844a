// The pieces of OptimizerShards: how parameters are cut and dealt, and where the pieces stand.
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/precision/state_parts.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd {

namespace {

/// Elements; cuts are at multiples of it, so that pieces stay aligned to cache lines.
constexpr std::int64_t kGrain = 64;

}  // namespace

void OptimizerShards::move_into_shared_memory(std::span<const std::pair<std::string, at::Tensor>> parameters) const {
  std::size_t bytes = 0;
  for (const auto& [name, parameter] : parameters)
    if (detail::has_memory_of_its_own(parameter)) bytes += aligned_to_member(parameter.nbytes());
  if (bytes == 0 || owners_.size() == 1) return;
  const auto memory = allocate_shared(bytes);
  if (!memory) return;
  std::size_t offset = 0;
  for (const auto& [name, parameter] : parameters) {
    if (!detail::has_memory_of_its_own(parameter)) continue;
    const at::Tensor moved = detail::view_of(memory, offset, parameter, parameter.scalar_type());
    offset += aligned_to_member(parameter.nbytes());
    moved.copy_(parameter);
    at::Tensor(parameter).set_data(moved);
  }
}

/// Whole parameters, the largest first, each to who has least.
void OptimizerShards::deal(std::vector<Piece>& whole) const {
  std::vector<std::size_t> order(whole.size()), loads(owners_.size(), 0);
  for (const auto& piece : pieces_) loads[piece.owner] += piece.parameter.nbytes();
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return whole[a].parameter.nbytes() > whole[b].parameter.nbytes(); });
  for (const auto index : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    whole[index].owner = static_cast<std::size_t>(least - loads.begin());
    *least += whole[index].parameter.nbytes();
  }
}

/// Cuts the parameters at these places of `pieces`, where each is one piece still, as if they lay end to end; `first` has the first share.
void OptimizerShards::cut_run(const std::vector<std::size_t>& run, std::size_t first, std::vector<std::vector<Piece>>& pieces) const {
  const std::size_t ranks = owners_.size();
  std::size_t total = 0, turn = 0, dealt = 0;
  for (const auto place : run) total += pieces[place].front().parameter.nbytes();
  const auto end_of = [&](std::size_t of) { return total / ranks * (of + 1) + total % ranks * (of + 1) / ranks; };
  for (const auto place : run) {
    Piece piece = std::exchange(pieces[place], {}).front();
    const auto size = static_cast<std::int64_t>(piece.parameter.element_size());
    const std::int64_t elements = piece.end;
    do {
      while (turn + 1 < ranks && dealt >= end_of(turn)) ++turn;
      const auto room = static_cast<std::int64_t>(end_of(turn) - std::min(dealt, end_of(turn)));
      const std::int64_t wanted = (room / size + kGrain - 1) / kGrain * kGrain;
      const bool all = turn + 1 == ranks || !piece.parameter.is_non_overlapping_and_dense() || wanted + kGrain >= elements - piece.begin;
      piece.end = all ? elements : piece.begin + std::max(wanted, kGrain);
      piece.owner = (first + turn) % ranks;
      pieces[place].push_back(piece);
      dealt += static_cast<std::size_t>((piece.end - piece.begin) * size);
      piece.begin = piece.end;
    } while (piece.begin < elements);
  }
}

/// Several runs begin with the first share each: of a parameter, a later share has what lies behind, as GradientKeeper::parts needs it.
std::vector<OptimizerShards::Piece> OptimizerShards::cut(std::span<const std::pair<std::string, at::Tensor>> parameters,
                                                         const Runs& runs) const {
  std::vector<Piece> whole;
  for (const auto& [name, parameter] : parameters) whole.push_back({name, parameter, 0, parameter.numel(), 0, {}, {}, {}});
  if (!detail::steps_by_element(wrapped_)) {
    deal(whole);
    return whole;
  }
  std::vector<std::size_t> every_place(whole.size());
  std::iota(every_place.begin(), every_place.end(), std::size_t{0});
  std::unordered_map<const void*, std::size_t> places;
  std::vector<std::vector<Piece>> by_parameter;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    places[whole[i].parameter.unsafeGetTensorImpl()] = i;
    by_parameter.push_back({whole[i]});
  }
  if (runs.empty()) {
    std::vector<std::size_t> loads(owners_.size(), 0);  // of what was cut before: who has least comes first
    for (const auto& piece : pieces_) loads[piece.owner] += piece.travels.nbytes();
    cut_run(every_place, static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin()), by_parameter);
  }
  for (const auto& run : runs) {
    std::vector<std::size_t> in_run;
    for (const auto& parameter : run) in_run.push_back(places.at(parameter.unsafeGetTensorImpl()));
    cut_run(in_run, 0, by_parameter);
  }
  std::vector<Piece> pieces;
  for (const auto& of_one : by_parameter) pieces.insert(pieces.end(), of_one.begin(), of_one.end());
  return pieces;
}

at::Tensor OptimizerShards::view_of(const Piece& piece) const {
  if (!piece.parameter.is_non_overlapping_and_dense()) return piece.parameter.detach();
  return detail::in_memory_order(piece.parameter).slice(0, piece.begin, piece.end);
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
    if (is_known_ && !piece.master) piece.tensor.set_data(piece.is_whole() ? piece.parameter.detach() : now.detach());
  }
}

/// This rank's pieces stand where their parameters do.
void OptimizerShards::arrange() {
  std::unordered_map<const void*, std::vector<at::Tensor>> mine;
  for (const auto& piece : pieces_)
    if (is_mine(piece)) mine[piece.parameter.unsafeGetTensorImpl()].push_back(piece.tensor);
  mine_.clear();
  parts_.clear();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    const void* const key = piece.parameter.unsafeGetTensorImpl();
    auto& parts = parts_.try_emplace(key, owners_.size(), 0).first->second;
    parts[piece.owner] += piece.end - piece.begin;
    if (is_mine(piece)) mine_[key].push_back(i);
  }
  shares_.clear();
  for (const auto& group : wrapped_.param_groups()) {
    auto& share = shares_.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = mine.find(parameter.unsafeGetTensorImpl());
      if (found != mine.end()) share.insert(share.end(), found->second.begin(), found->second.end());
    }
  }
}

}  // namespace hvd
