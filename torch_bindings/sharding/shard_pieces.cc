#include "torch_bindings/sharding/shard_pieces.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// Elements; cuts are at multiples of it, so that pieces stay aligned to cache lines.
constexpr std::int64_t kGrain = 64;

ShardPieces whole_pieces(NamedParameters parameters) {
  ShardPieces whole;
  for (const auto& [name, parameter] : parameters)
    whole.push_back({.name = name, .parameter = parameter, .end = parameter.numel()});
  return whole;
}

/// Cuts the parameters at these places of `pieces`, where each is one piece still, as if they lay
/// end to end; share `first` comes first.
void cut_run(const std::vector<std::size_t>& run, std::size_t ranks, std::size_t first,
             std::vector<ShardPieces>& pieces) {
  std::size_t total = 0, turn = 0, dealt = 0;
  for (const auto place : run) total += pieces[place].front().parameter.nbytes();
  const auto end_of = [&](std::size_t of) {
    return total / ranks * (of + 1) + total % ranks * (of + 1) / ranks;
  };
  for (const auto place : run) {
    ShardPiece piece = std::exchange(pieces[place], {}).front();
    const auto size = static_cast<std::int64_t>(piece.parameter.element_size());
    const std::int64_t elements = piece.end;
    do {
      while (turn + 1 < ranks && dealt >= end_of(turn)) ++turn;
      const auto room = static_cast<std::int64_t>(end_of(turn) - std::min(dealt, end_of(turn)));
      const std::int64_t wanted = (room / size + kGrain - 1) / kGrain * kGrain;
      const bool all = turn + 1 == ranks || !piece.parameter.is_non_overlapping_and_dense() ||
                       wanted + kGrain >= elements - piece.begin;
      piece.end = all ? elements : piece.begin + std::max(wanted, kGrain);
      piece.owner = (first + turn) % ranks;
      pieces[place].push_back(piece);
      dealt += static_cast<std::size_t>((piece.end - piece.begin) * size);
      piece.begin = piece.end;
    } while (piece.begin < elements);
  }
}

}  // namespace

at::Tensor ShardPiece::view() const {
  if (!parameter.is_non_overlapping_and_dense()) return parameter.detach();
  return in_memory_order(parameter).slice(0, begin, end);
}

ShardPieces deal_to_shares(NamedParameters parameters, std::size_t shares,
                           const ShardPieces& known) {
  ShardPieces whole = whole_pieces(parameters);
  std::vector<std::size_t> order(whole.size()), loads(shares, 0);
  for (const auto& piece : known) loads[piece.owner] += piece.parameter.nbytes();
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return whole[a].parameter.nbytes() > whole[b].parameter.nbytes();
  });
  for (const auto index : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    whole[index].owner = static_cast<std::size_t>(least - loads.begin());
    *least += whole[index].parameter.nbytes();
  }
  return whole;
}

/// Several runs begin with the first share each: of a parameter, a later share has what lies
/// behind, as GradientKeeper::parts needs it.
ShardPieces cut_into_shares(NamedParameters parameters, const ShardRuns& runs, std::size_t shares,
                            const ShardPieces& known) {
  std::unordered_map<const void*, std::size_t> places;
  std::vector<ShardPieces> by_parameter;
  for (auto& piece : whole_pieces(parameters)) {
    places[piece.parameter.unsafeGetTensorImpl()] = by_parameter.size();
    by_parameter.push_back({std::move(piece)});
  }
  if (runs.empty()) {
    std::vector<std::size_t> every_place(by_parameter.size());
    std::iota(every_place.begin(), every_place.end(), std::size_t{0});
    std::vector<std::size_t> loads(shares, 0);
    for (const auto& piece : known) loads[piece.owner] += piece.travels.nbytes();
    cut_run(every_place, shares,
            static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin()),
            by_parameter);
  }
  for (const auto& run : runs) {
    std::vector<std::size_t> in_run;
    for (const auto& parameter : run) in_run.push_back(places.at(parameter.unsafeGetTensorImpl()));
    cut_run(in_run, shares, 0, by_parameter);
  }
  ShardPieces pieces;
  for (const auto& of_one : by_parameter) pieces.insert(pieces.end(), of_one.begin(), of_one.end());
  return pieces;
}

}  // namespace hvd::detail
