#pragma once
/// The shares of gradients that a rank keeps with ZeRO stage 2, in the pieces of its optimizer
/// (torch_bindings/sharding/optimizer_shards.h). Threads: as GradientKeeper says. Refers to the
/// pieces, which hold the shares. Errors: none of its own.
// Tested in tests/torch_bindings/sharding/shard_gradients_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_bindings/gradients/gradient_bucket.h"
#include "torch_bindings/sharding/shard_pieces.h"

namespace hvd::detail {

class GradientShares final : public GradientKeeper {
 public:
  explicit GradientShares(ShardPieces& pieces) : pieces_(pieces) {}

  /// Notes that there are other pieces now, in so many shares. Only of parameters that are
  /// `stepped`, as they stand in a group, this rank's parts are kept.
  void arrange(std::size_t shares, const std::unordered_set<const void*>& stepped);
  /// Keeps them from now on: `.grad` has none. Until then they are there to be looked at.
  void begin() { are_kept_ = true; }
  [[nodiscard]] bool are_kept() const { return are_kept_; }
  [[nodiscard]] const std::vector<std::int64_t>& parts(const at::Tensor& parameter) const override;
  void keep(const at::Tensor& parameter, const at::Tensor& reduced) override;
  void drop(const at::Tensor& parameter) override;
  void drop_all();
  /// Does what `zero_grad(set_to_none)` does to gradients. Zeros need no memory.
  void zero(bool set_to_none);
  /// Puts the zeros that there are into `.grad`, for who keeps no shares any more.
  void leave_zeros() const;
  /// Returns them, in the order of the pieces, with the names of their parameters: of 16-bit
  /// parameters with masters in fp32.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> all() const;
  /// Returns the gradient that the wrapped optimizer sees of one of this rank's pieces; undefined
  /// if there is none. `masters`: those of 16-bit parameters; null without any.
  [[nodiscard]] at::Tensor of(const ShardPiece& piece, const MasterCopies* masters) const;

 private:
  /// A Left is what there would be in `.grad` between two rounds.
  enum class Left { Nothing, Gradient, Zeros };

  ShardPieces& pieces_;
  std::unordered_map<const void*, std::vector<std::size_t>> mine_;  ///< by parameter: own pieces
  std::unordered_map<const void*, std::vector<std::int64_t>>
      parts_;                                   ///< by parameter: elements in each share
  std::unordered_map<const void*, Left> left_;  ///< by parameter
  bool are_kept_ = false;
};

}  // namespace hvd::detail
