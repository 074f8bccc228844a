#pragma once
/// RoundWork is what one rank does for all in a round of a repeated operation
/// (hvd/engine/core/repeated_op.h) that all of them have arrived in: sees whether it may, finds
/// their blocks, does the operation in them, and tells them that it is done. Under the engine's
/// mutex.
// Tested in tests/hvd/engine/fast_path_test.cc

#include <cstddef>
#include <span>
#include <vector>

#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/repeated_op.h"
#include "hvd/engine/fast_path/pulled_rounds.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

/// Returns how the round at `place` among so many ended, which were ended together.
[[nodiscard]] Rounds::Company company_of(std::size_t place, std::size_t count);

/// Returns whether rounds of the two count as one batch where they end together: on all ranks, or
/// the ranks would count differently.
[[nodiscard]] bool share_batch(const RepeatedOp& one, const RepeatedOp& other);

class RoundWork {
 public:
  RoundWork(const EngineParts& parts, NegotiationLog& log);

  /// Returns whether the ranks' table still knows the operation as it was made: looks it up, if
  /// there is anything new.
  bool is_valid(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  /// Returns whether all ranks of this domain have arrived by the fast path, and nothing has been
  /// said meanwhile that speaks against it: then their blocks are `blocks`. Requires that all but
  /// this rank have arrived.
  bool is_possible(RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  /// Finds the blocks whatever has been said meanwhile. Returns false where one is missing.
  bool find_blocks(const RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] std::span<std::byte* const> blocks() const HVD_REQUIRES(engine_mutex) {
    return blocks_;
  }
  /// Returns where the inputs are, which are only read: in the blocks, unless it is done in place.
  [[nodiscard]] std::span<const std::byte* const> inputs(const RepeatedOp& op)
      HVD_REQUIRES(engine_mutex);
  /// Claims the round. Returns false if another rank has.
  bool claim(const RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  /// Does the operation in the blocks that were found. Requires the claim.
  void run(const RepeatedOp& op) HVD_REQUIRES(engine_mutex);
  /// Tells the ranks that the results are in their blocks. Requires the claim.
  void end(const RepeatedOp& op, Rounds::Company company) HVD_REQUIRES(engine_mutex);
  /// Copies the result from this rank's block to where it is to go.
  static void copy_result(RepeatedOp& op);
  /// Returns the rounds whose results each rank gets out of the others' blocks.
  [[nodiscard]] const PulledRounds& pulled() const { return pulled_; }

 private:
  Board& board_;
  NegotiationLog& log_;
  const PulledRounds pulled_;
  std::vector<std::byte*> blocks_ HVD_GUARDED_BY(engine_mutex);
  const std::byte* input_ HVD_GUARDED_BY(engine_mutex) = nullptr;
};

}  // namespace hvd
