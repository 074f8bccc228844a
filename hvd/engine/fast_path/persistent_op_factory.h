#pragma once
/// Makes the persistent operations (hvd/engine/core/persistent_op.h) of entries that are worth one. It keeps nothing. Under the engine's
/// mutex.

#include <memory>

#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/persistent_op.h"
#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

class PersistentOpFactory {
 public:
  PersistentOpFactory(const EngineParts& parts, NegotiationLog& log) : parts_(parts), log_(log), board_(*parts.board) {}

  /// Returns all of the operation but its entry and its block; null if the entry is not worth one.
  [[nodiscard]] std::shared_ptr<PersistentOp> describe(const Entry& entry) const;
  /// Gives it the block that it keeps, if it is to have one. Returns false if there is no room.
  [[nodiscard]] bool give_block(PersistentOp& op) const;
  /// Returns the entry that is put into the ledger where the operation goes there. `like`: the one that it is made of.
  [[nodiscard]] static std::unique_ptr<Entry> entry_for(PersistentOp& op, const Entry& like);

 private:
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  [[nodiscard]] bool may_be_direct(const Entry& entry, const ProcessSetInfo& set) const;
  bool lay_out(PersistentOp& op, const Entry& entry) const;

  const EngineParts& parts_;
  NegotiationLog& log_;
  Board& board_;
};

}  // namespace hvd
