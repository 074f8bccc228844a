#pragma once
/// The repeated operations of a rank (hvd/engine/core/repeated_op.h): made of entries that are
/// worth one, found by name, and dropped. Under the engine's mutex.
// Tested in tests/hvd/engine/repeated_op_test.cc

#include <memory>

#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/repeated_op.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

class RepeatedOpFactory {
 public:
  RepeatedOpFactory(const EngineParts& parts, NegotiationLog& log, Ledger& ledger)
      : parts_(parts), log_(log), ledger_(ledger), board_(*parts.board) {}

  /// Returns those that there are.
  [[nodiscard]] const RepeatedOps& ops() const HVD_REQUIRES(engine_mutex) { return ops_; }
  /// Makes one of an entry that has ended well and is worth it. Never throws: without one the next
  /// is submitted as this was.
  void make(const Entry& entry) noexcept HVD_REQUIRES(engine_mutex);
  void drop(const UnitKey& key) noexcept HVD_REQUIRES(engine_mutex);
  /// Drops those of a removed process set. Returns false while one of them is in use.
  bool drop_set(int process_set) noexcept HVD_REQUIRES(engine_mutex);
  /// Returns how many there are, and gives back what they keep. None may be in use.
  std::size_t drop_all() HVD_REQUIRES(engine_mutex);

 private:
  /// Returns all of the operation but its entry and its block; null if the entry is not worth one.
  [[nodiscard]] std::shared_ptr<RepeatedOp> describe(const Entry& entry) const;
  /// Gives it a pinned block, if it is to have one. Returns false if there is no room.
  [[nodiscard]] bool give_block(RepeatedOp& op) const;
  /// Returns the entry that is put into the ledger where the operation goes there. `like`: the one
  /// that it is made of.
  [[nodiscard]] static std::unique_ptr<Entry> entry_for(RepeatedOp& op, const Entry& like);
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  [[nodiscard]] bool may_be_direct(const Entry& entry, const ProcessSetInfo& set) const;
  bool lay_out(RepeatedOp& op, const Entry& entry) const;
  bool make_space() HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Ledger& ledger_;
  Board& board_;
  RepeatedOps ops_ HVD_GUARDED_BY(engine_mutex);
  SlotMemory* lender_ HVD_GUARDED_BY(engine_mutex) =
      nullptr;  ///< of the blocks that are leased for rounds, once there are any
};

}  // namespace hvd
