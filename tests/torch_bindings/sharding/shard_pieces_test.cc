// How parameters are cut into shares: every element is in one piece, in order, and the shares are
// equal up to a cut's grain.
#include "torch_bindings/sharding/shard_pieces.h"

#include <doctest/doctest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using hvd::detail::cut_into_shares;
using hvd::detail::deal_to_shares;
using hvd::detail::NamedParameters;
using hvd::detail::ShardPieces;
using hvd::detail::ShardRuns;
using Named = std::vector<std::pair<std::string, at::Tensor>>;
using Rows = std::vector<std::string>;

Named named(const std::vector<at::Tensor>& tensors) {
  Named all;
  for (const auto& tensor : tensors) all.emplace_back("p" + std::to_string(all.size()), tensor);
  return all;
}

Named zeros(const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (const auto size : sizes) tensors.push_back(torch::zeros({size}));
  return named(tensors);
}

/// Returns the pieces in words: "p0 0-256 in 1".
Rows rows(const ShardPieces& pieces) {
  Rows all;
  for (const auto& piece : pieces)
    all.push_back(piece.name + " " + std::to_string(piece.begin) + "-" + std::to_string(piece.end) +
                  " in " + std::to_string(piece.owner));
  return all;
}

std::vector<std::int64_t> bytes_by_share(const ShardPieces& pieces, std::size_t shares) {
  std::vector<std::int64_t> bytes(shares, 0);
  for (const auto& piece : pieces)
    bytes.at(piece.owner) += (piece.end - piece.begin) * piece.parameter.element_size();
  return bytes;
}

/// Checks that each parameter is there once from its first element to its last, with shares that do
/// not go back.
void check_whole(const Named& parameters, const ShardPieces& pieces, bool in_order) {
  std::size_t at = 0;
  for (const auto& [name, parameter] : parameters) {
    std::int64_t end = 0;
    std::size_t owner = 0;
    do {
      REQUIRE(at < pieces.size());
      CHECK(pieces[at].parameter.is_same(parameter));
      CHECK(pieces[at].name == name);
      CHECK(pieces[at].begin == end);
      if (end > 0 && in_order) CHECK(pieces[at].owner >= owner);
      owner = pieces[at].owner;
      end = pieces[at++].end;
    } while (end < parameter.numel());
    CHECK(end == parameter.numel());
  }
  CHECK(at == pieces.size());
}

TEST_CASE(
    "shard pieces: parameters laid end to end are cut where a share of the bytes ends, at "
    "multiples of 64 elements") {
  const Named two = zeros({256, 256});
  CHECK(rows(cut_into_shares(two, {}, 2, {})) == Rows{"p0 0-256 in 0", "p1 0-256 in 1"});
  CHECK(rows(cut_into_shares(two, {}, 4, {})) ==
        Rows{"p0 0-128 in 0", "p0 128-256 in 1", "p1 0-128 in 2", "p1 128-256 in 3"});
  CHECK(rows(cut_into_shares(zeros({300}), {}, 2, {})) == Rows{"p0 0-192 in 0", "p0 192-300 in 1"});
  // what is left is less than a grain
  CHECK(rows(cut_into_shares(zeros({70}), {}, 2, {})) == Rows{"p0 0-70 in 0"});
  CHECK(rows(cut_into_shares(zeros({256}), {}, 1, {})) == Rows{"p0 0-256 in 0"});
  CHECK(rows(cut_into_shares(zeros({0}), {}, 2, {})) == Rows{"p0 0-0 in 1"});
}

TEST_CASE("shard pieces: each run is cut by itself, so that all shares have an equal part of it") {
  const Named three = zeros({256, 256, 512});
  const ShardRuns runs{{three[2].second}, {three[0].second, three[1].second}};
  CHECK(rows(cut_into_shares(three, runs, 2, {})) ==
        Rows{"p0 0-256 in 0", "p1 0-256 in 1", "p2 0-256 in 0", "p2 256-512 in 1"});
}

TEST_CASE("shard pieces: later parameters go first to the share that has least") {
  const Named first = zeros({70});
  ShardPieces known = cut_into_shares(first, {}, 2, {});
  for (auto& piece : known) piece.travels = piece.view();
  CHECK(rows(cut_into_shares(zeros({256}), {}, 2, known)) ==
        Rows{"p0 0-128 in 1", "p0 128-256 in 0"});
  CHECK(rows(deal_to_shares(zeros({8, 100}), 2, known)) == Rows{"p0 0-8 in 0", "p1 0-100 in 1"});
}

TEST_CASE("shard pieces: whole parameters are dealt the largest first") {
  CHECK(rows(deal_to_shares(zeros({10, 40, 20, 30}), 2, {})) ==
        Rows{"p0 0-10 in 0", "p1 0-40 in 0", "p2 0-20 in 1", "p3 0-30 in 1"});
}

TEST_CASE(
    "shard pieces: a view has its elements in the order of memory, and of a parameter with gaps "
    "all") {
  const at::Tensor turned = torch::arange(256, torch::kFloat).view({16, 16}).t();
  const ShardPieces pieces = cut_into_shares(named({turned}), {}, 2, {});
  REQUIRE(pieces.size() == 2);
  CHECK(torch::equal(pieces[0].view(), torch::arange(128, torch::kFloat)));
  CHECK(torch::equal(pieces[1].view(), torch::arange(128, 256, torch::kFloat)));
  CHECK(pieces[1].state_bytes() == 128 * 4);
  const at::Tensor gaps = torch::zeros({256, 2}).select(1, 0);
  const ShardPieces whole = cut_into_shares(named({gaps}), {}, 2, {});
  REQUIRE(whole.size() == 1);
  CHECK(whole[0].is_whole());
  CHECK(whole[0].view().is_alias_of(gaps));
}

TEST_CASE(
    "shard pieces: any parameters and numbers of shares are whole, in order, and equal up to a "
    "grain for each parameter") {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::int64_t> sizes(1 + random() % 6);
    for (auto& size : sizes) size = static_cast<std::int64_t>(random() % 2000);
    const Named parameters = zeros(sizes);
    const std::size_t shares = 1 + random() % 5;
    const ShardPieces pieces = cut_into_shares(parameters, {}, shares, {});
    check_whole(parameters, pieces, true);
    const auto bytes = bytes_by_share(pieces, shares);
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    CHECK(*most - *least <= static_cast<std::int64_t>(2 * 64 * 4 * (sizes.size() + 1)));
    check_whole(parameters, deal_to_shares(parameters, shares, {}), false);
  }
}

}  // namespace
