#pragma once
/// DirectMemory has the blocks and the arithmetic of repeated small operations on all ranks of
/// several domains, which the leaders end among themselves
/// (hvd/negotiation/leaders/direct_rounds.h). Results have the bits that a batch gives: a domain
/// contributes what the ReductionPlan says. The blocks are in the domain's arena; a rank that is
/// alone in its domain has them in memory of its own. It owns them. Any thread, one at a time but
/// for `drop`. It fails with WireError: a contribution of another length than it must have.

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "hvd/fast_path_memory.h"
#include "ops/p2p/context.h"
#include "ops/p2p/reduction.h"

namespace hvd {

class DirectMemory final : public LeaderMemory {
 public:
  explicit DirectMemory(P2pContext& context) : context_(context) {}

  std::optional<std::uint64_t> keep(const BatchTraits& traits, std::size_t bytes) override;
  void drop(std::uint64_t location) noexcept override;
  bool is_free(std::uint64_t location) override;
  std::byte* kept(int index, std::uint64_t location) override;
  std::size_t contribution_bytes(const BatchTraits& traits, std::int64_t count) override;
  void contribute(const BatchTraits& traits, std::int64_t count,
                  std::span<const std::byte* const> blocks, Bytes& message) override;
  void combine(const BatchTraits& traits, std::int64_t count,
               std::span<const std::span<const std::byte>> contributions,
               std::span<std::byte* const> blocks, std::span<const std::int64_t> parts) override;

 private:
  /// The plan that follows from the traits; the last one is cached.
  struct Plan {
    BatchTraits traits;
    Arrangement who;
    ReductionPlan reduction;
    std::vector<std::size_t> domains;  ///< the numbers of the domains, as they are arranged
    [[nodiscard]] bool is_of(const BatchTraits& others) const;
    /// Returns whether a domain contributes its ranks' inputs as they are.
    [[nodiscard]] bool is_raw() const {
      return reduces(traits.kind) ? reduction.raw : traits.kind != OpKind::Broadcast;
    }
  };
  const Plan& plan_of(const BatchTraits& traits);
  /// Arrays of the operation's inputs in what an arranged domain contributes.
  [[nodiscard]] static std::size_t arrays(const Plan& plan, std::size_t arranged);

  /// The block of a rank that is alone in its domain; null if the location is none of its.
  [[nodiscard]] std::byte* find_own(std::uint64_t location);

  P2pContext& context_;
  std::mutex mutex_;  ///< of the next two: an operation may end, and drop its block, anywhere
  // NOLINT(modernize-avoid-c-arrays): not initialized
  std::map<std::uint64_t, std::unique_ptr<std::byte[]>> own_;
  std::uint64_t next_own_ = 0;
  std::unique_ptr<const Plan> plan_;
  std::vector<const void*> in_;
  std::vector<void*> out_;
};

}  // namespace hvd
