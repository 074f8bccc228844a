#pragma once
/// PulledRounds are the one-sided rounds of repeated operations
/// (hvd/engine/core/repeated_op.h), whose inputs are too large for one rank to do the work for
/// all: each rank puts its input into a block that it leases for the round, the last to arrive
/// tells all where the blocks are, and each gets what it needs out of them, all at the same time. A
/// block is leased again once all have read it, so its owner may go on at once: to the next round,
/// to something else under that name, or out of the set. Under the engine's mutex, but for `pull`
/// and `let_go`. No state.
///
/// The places of the blocks are in each rank's inline data, written by who has the claim: the
/// ranks' words of the round may be others by the time that a slow one reads them, as a rank that
/// has joined or called shutdown() meanwhile holds nobody up.

#include "hvd/engine/core/repeated_op.h"
#include "hvd/negotiation/board/board.h"

namespace hvd {

class PulledRounds {
 public:
  /// `rank`: the global one.
  PulledRounds(Board& board, int rank) : board_(board), rank_(rank) {}

  /// Leases a block for a round that this rank is going to begin. Returns false if there is none.
  [[nodiscard]] bool begin(RepeatedOp& op) const;
  /// Returns whether all ranks take the fast path. Requires that all but this one have arrived.
  [[nodiscard]] bool have_all_begun(const RepeatedOp& op) const;
  /// Tells all ranks where the blocks are. Requires the claim.
  void tell(const RepeatedOp& op) const;
  /// Finds the blocks that this rank has been told of. Before its result is taken from the board.
  /// From then on its own block is leased again when all have read it.
  void find_sources(RepeatedOp& op) const;
  /// Gets the result out of the blocks, to `output` if not null, and lets go of them. Any thread.
  static void pull(RepeatedOp& op, void* output);
  /// This rank needs the others' blocks no more, if it still does. Any thread.
  static void let_go(RepeatedOp& op);
  /// The round has ended in another way, or has not begun. `is_open`: others may still find that it
  /// ends here, so that the block is not leased again.
  void end(RepeatedOp& op, bool is_open) const;

 private:
  [[nodiscard]] bool is_read(const RepeatedOp& op, int rank) const;

  Board& board_;
  const int rank_;
};

}  // namespace hvd
