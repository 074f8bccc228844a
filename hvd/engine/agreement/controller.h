#pragma once
/// Brings this rank's entries to an agreement of all: introduces them to the other ranks, counts
/// their arrival, and agrees what all are ready for; makes room in the table by evicting names that
/// are not in use. All by records of the log. Under the engine's mutex; functions that append take
/// the board's lock, and wait for other ranks to read when the log is full.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/engine/agreement/cutter.h"
#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

/// Returns the bytes of the record that introduces such a unit; never too few.
std::size_t introduction_bytes(const UnitKey& key, const Signature& signature);

class Controller {
 public:
  Controller(const EngineParts& parts, NegotiationLog& log, Cutter& cutter, EngineMutex& mutex)
      : parts_(parts), log_(log), cutter_(cutter), mutex_(mutex), board_(*parts.board) {}

  enum class Announced : std::uint8_t {
    Yes,
    NoRoom,      ///< there is no room in the table just now, or the end of a prepared round comes
                 ///< first: to be called again later
    Joined,      ///< this rank has joined the set
    SetRemoved,  ///< the set has been removed
  };
  /// Introduces the entry, if the ranks do not know it yet, and arrives: from then on it is
  /// everybody's, and reading the log may finish it. `arrived` then counts the ranks of this domain
  /// that have, and `agree_if_complete` is to follow. Throws BackendError if more tensors are in
  /// flight than the table has slots.
  Announced announce(Entry& entry, Ledger& ledger, std::uint32_t& arrived)
      HVD_REQUIRES(engine_mutex);
  /// Agrees on the unit if this arrival, the `arrived`th, was the last, or if all others have
  /// joined. Returns whether it was so. `cuts`: what is agreed is cut too, where no batch of the
  /// set is open; else it is to be cut later, together with what comes.
  bool agree_if_complete(const UnitKey& key, std::uint32_t id, std::uint32_t arrived,
                         bool cuts = true) HVD_REQUIRES(engine_mutex);
  /// Returns whether all ranks of this domain that have not joined have arrived.
  [[nodiscard]] bool is_complete(std::uint32_t id) const HVD_REQUIRES(engine_mutex);

  // ---- what other domains say, and the root decides; by the leader
  /// Ranks elsewhere say what they send, all the same. Without room it is told again when this
  /// domain needs it. Ranks of this domain among `ranks` have spoken for themselves.
  void introduce_remote(const UnitKey& key, Runs ranks, const Signature& signature)
      HVD_REQUIRES(engine_mutex);
  /// Forgets the unit if nobody in this domain uses it. Returns false if somebody does.
  bool drop(const UnitKey& key) HVD_REQUIRES(engine_mutex);
  /// Forgets some of the units of process sets that were removed, if no rank of this domain needs
  /// them any more.
  void evict_removed() HVD_REQUIRES(engine_mutex);
  /// All ranks are ready. `retell` introduces again what ranks elsewhere have said of the unit.
  void agree_by_root(const UnitKey& key, const Agreement& what, const std::function<void()>& retell)
      HVD_REQUIRES(engine_mutex);
  /// All ranks have left, and nothing more will be decided.
  void end() HVD_REQUIRES(engine_mutex);

  // ---- different operations under one name
  /// Returns for each rank of this domain that is in the set with which operation it waits for long
  /// under the name; empty if one does not.
  [[nodiscard]] std::vector<StuckRank> stuck_here(int process_set, const std::string& name) const
      HVD_REQUIRES(engine_mutex);
  /// Ends the operations that all ranks of a set within this domain are stuck with, if they differ.
  void end_conflict_here(int process_set, const std::string& name) HVD_REQUIRES(engine_mutex);
  /// Ends the operations that ranks of all domains are stuck with, as far as they are known here.
  void end_conflict(int process_set, const std::string& name,
                    const std::vector<StuckRank>& stuck_ranks) HVD_REQUIRES(engine_mutex);

  // ---- deadlines
  /// Returns the ranks of this domain that have not submitted what ranks of several domains wait
  /// for.
  [[nodiscard]] std::vector<int> missing_here(const UnitKey& key) const;

 private:
  /// The time at which a tensor can be introduced: now; once all ranks have read what is in the
  /// log; once something is cut; not before some of what is in flight is done.
  enum class Room : std::uint8_t { Now, AfterReading, AfterCutting, None };

  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  bool introduce(Entry& entry, Ledger& ledger) HVD_REQUIRES(engine_mutex);
  bool arrive(const Entry& entry, std::uint32_t& arrived) HVD_REQUIRES(engine_mutex);
  Room introduce_in(Transaction& log, const UnitKey& key, int rank, const Signature& signature)
      HVD_REQUIRES(engine_mutex, board_lock);
  Room make_room_for(Transaction& log, const UnitKey& key, std::uint32_t slots,
                     std::size_t introduction) HVD_REQUIRES(engine_mutex, board_lock);
  Room make_room(Transaction& log, std::uint32_t slots, std::size_t introduction)
      HVD_REQUIRES(engine_mutex, board_lock);
  [[nodiscard]] bool is_evictable(std::uint32_t id) const;
  bool evict(Transaction& log, std::uint32_t id) HVD_REQUIRES(engine_mutex, board_lock);
  void agree(std::uint32_t id, bool cuts = true) HVD_REQUIRES(engine_mutex);
  bool try_to_agree(std::uint32_t id, bool cuts) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] Agreement agreement_of(const Unit& unit) const;
  bool join(int process_set) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool awaits_promised(int process_set) const;
  [[nodiscard]] std::vector<int> absent_from(const Unit& unit) const;
  [[nodiscard]] bool have_read(const std::vector<int>& ranks, std::uint64_t position) const;
  bool try_to_void(Transaction& log, int process_set, const std::string& name,
                   const std::vector<StuckRank>& stuck_ranks)
      HVD_REQUIRES(engine_mutex, board_lock);

  const EngineParts& parts_;
  NegotiationLog& log_;
  Cutter& cutter_;
  EngineMutex& mutex_;
  Board& board_;
};

}  // namespace hvd
