#include "torch_bindings/sharding/piece_exchange.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// Bytes that a rank sends at once of what one rank alone gets.
constexpr std::int64_t kPortionBytes = std::int64_t{1} << 20;

}  // namespace

PieceExchange::PieceExchange(const ShardPieces& pieces, ProcessSet process_set,
                             std::vector<int> owners, std::string name)
    : pieces_(pieces),
      process_set_(std::move(process_set)),
      owners_(std::move(owners)),
      name_(std::move(name)) {}

bool PieceExchange::gets_whole(std::optional<int> only) { return !only || *only == hvd::rank(); }

void PieceExchange::broadcast(const std::vector<at::Tensor>& tensors,
                              const std::string& what) const {
  if (process_set_.size() == 1) return;
  std::map<std::pair<std::size_t, std::string>,
           std::pair<std::vector<at::Tensor>, std::vector<std::string>>>
      groups;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    const ShardPiece& piece = pieces_[i];
    const std::string device = tensors[i].device().str();
    auto& [members, names] = groups[{piece.owner, device.substr(0, device.find(':'))}];
    members.push_back(tensors[i]);
    names.push_back(piece.name);
  }
  std::vector<Handle<std::vector<at::Tensor>>> handles;
  for (auto& [key, group] : groups)
    handles.push_back(grouped_broadcast_async_(
        std::move(group.first), std::move(group.second),
        {.name = formatted("{}/{} of rank {} on {}", name_, what, owners_[key.first], key.second),
         .root_rank = owners_[key.first],
         .process_set = process_set_}));
  for (const auto& handle : handles) handle.wait();
}

std::string PieceExchange::to_twins(const std::string& text, const std::vector<int>& twins) const {
  const auto ranks = process_set_.ranks();
  const auto bytes = static_cast<std::int64_t>(text.size());
  const at::Tensor most = allreduce(
      torch::tensor({bytes}, at::kLong),
      {.name = name_ + "/bytes for twins", .op = ReduceOp::Max, .process_set = process_set_});
  std::string received;
  for (std::int64_t at = 0; at < most.item<std::int64_t>(); at += kPortionBytes) {
    const std::int64_t first = std::min(at, bytes), count = std::min(kPortionBytes, bytes - first);
    const at::Tensor portion = bytes_of_text(
        text.substr(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
    const at::Tensor splits = torch::zeros({process_set_.size()}, torch::kInt64);
    for (const int twin : twins)
      splits[std::find(ranks.begin(), ranks.end(), twin) - ranks.begin()] = count;
    received +=
        text_of(alltoall(portion.repeat({static_cast<std::int64_t>(twins.size())}),
                         {.name = name_ + "/twins", .splits = splits, .process_set = process_set_})
                    .output);
  }
  return received;
}

namespace {

/// The bytes of this rank's share of the piece, in the order of the whole.
at::Tensor bytes_of_share(const ShardPiece& piece, const at::Tensor& own) {
  const at::Tensor typed = own.to(piece.state_type());
  // It may lie in another order than the whole.
  if (!piece.is_whole() || typed.sizes() != piece.parameter.sizes())
    return bytes_in_memory_order(typed);
  const at::Tensor like = at::empty_like(piece.parameter, typed.options().requires_grad(false));
  return in_memory_order_of(typed, like).view(at::kByte);
}

}  // namespace

void PieceExchange::gather(const std::vector<at::Tensor>& whole, const std::vector<at::Tensor>& own,
                           const std::vector<std::int64_t>& bytes, const std::string& what,
                           std::optional<int> only) const {
  if (!only || process_set_.size() == 1) {
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      if (own[i].defined() && whole[i].defined()) whole[i].copy_(own[i]);
    return broadcast(whole, what);
  }
  const auto ranks = process_set_.ranks();
  const auto root = std::find(ranks.begin(), ranks.end(), *only);
  if (root == ranks.end()) return;
  // Calls `part(piece, first, count)` for the bytes from `at` that a share's owner sends at once.
  const auto for_each_part = [&](int sender, std::int64_t at, const auto& part) {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (owners_[pieces_[i].owner] != sender) continue;
      const std::int64_t begin = std::max<std::int64_t>(0, at),
                         end = std::min(bytes[i], at + kPortionBytes);
      if (begin < end) part(i, begin, end - begin);
      at -= bytes[i];
    }
  };
  std::map<int, std::int64_t> all;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    all[owners_[pieces_[i].owner]] += bytes[i];
    if (gets_whole(only) && owns(pieces_[i]) && own[i].defined()) whole[i].copy_(own[i]);
  }
  all.erase(*only);
  std::int64_t most = 0;
  for (const auto& [sender, count] : all) most = std::max(most, count);
  // The piece whose bytes these are: what has to be turned is turned once, not for each portion.
  std::optional<std::size_t> current;
  at::Tensor current_bytes;
  const auto bytes_to_send = [&](std::size_t i) -> const at::Tensor& {
    if (current != i) current_bytes = bytes_of_share(pieces_[i], own[i]);
    current = i;
    return current_bytes;
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
        alltoall(mine, {.name = formatted("{}/{} to rank {}", name_, what, *only),
                        .splits = splits,
                        .process_set = process_set_})
            .output;
    std::int64_t place = 0;
    for (const int sender : gets_whole(only) ? ranks : std::vector<int>{})
      if (sender != *only)
        for_each_part(sender, at, [&](std::size_t i, std::int64_t first, std::int64_t count) {
          bytes_in_memory_order(whole[i])
              .narrow(0, first, count)
              .copy_(received.narrow(0, place, count));
          place += count;
        });
  }
}

}  // namespace hvd::detail
