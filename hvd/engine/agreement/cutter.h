#pragma once
/// Decides when what is agreed becomes batches, and owns their places on the board: the only part
/// that opens, retires and departs. Of each process set one cut is open at a time, so that what is
/// agreed meanwhile can share the next one, and no set waits for another. A cut that the board has
/// no place for waits.
///
/// Within a domain whoever completes an agreement, or is done with a batch, cuts. For sets that
/// span domains the root does. It sees the end of cuts that its own domain takes part in; of the
/// others it learns by credit: the leader of each domain counts the cuts of a set that are over
/// there, and tells the root. A domain has at most `kCredit` cuts of a set before it that it has
/// not told the end of. Under the engine's mutex.

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

/// The number of cuts of a set that are over in a domain.
struct CutCredit {
  int process_set = 0;
  int domain = 0;
  std::uint64_t over = 0;
};

class Cutter {
 public:
  /// Bytes of the log for the cut that may follow an agreement.
  static constexpr std::size_t kCutBytes = 32 + kDataTypes * sizeof(std::uint64_t);
  /// Cuts of a set that the root makes before it hears that the first of them is over in each
  /// domain. Half of them are told of at once.
  static constexpr std::uint64_t kCredit = 64;

  Cutter(const EngineParts& parts, NegotiationLog& log, EngineMutex& mutex);

  // ---- within a domain
  /// Cuts what this domain has agreed on the set, if no batch of it is open. `log` has `kCutBytes`
  /// to spare.
  void cut_if_idle(Transaction& log, int process_set) HVD_REQUIRES(engine_mutex, board_lock);
  /// Cuts what is agreed of all sets within this domain of which no batch is open.
  void cut_idle_sets() HVD_REQUIRES(engine_mutex);
  /// The next batches of the set may be cut: the first rank to say so of the last of them does it.
  /// Again: nothing happens.
  void retire(const CutBatch& cut) HVD_REQUIRES(engine_mutex);
  /// This rank is done with the batch, which was retired. When all have said so, its place is free.
  void depart(const CutBatch& cut) HVD_REQUIRES(engine_mutex);

  // ---- by leaders
  /// Cuts the next batches of a set that spans domains, as the root says. `announce`: the root's,
  /// called once it is certain. False, and nothing has happened, if the board has no places for
  /// them yet.
  bool cut_world(int process_set, const std::function<void()>& announce = {})
      HVD_REQUIRES(engine_mutex);
  /// Returns the sets of which the root may cut now.
  std::vector<int> sets_to_cut() HVD_REQUIRES(engine_mutex);
  /// Root: a domain tells of cuts that are over there.
  void take_credit(const CutCredit& credit) HVD_REQUIRES(engine_mutex);
  /// Returns what this domain has to tell the root.
  std::vector<CutCredit> credits_to_tell() HVD_REQUIRES(engine_mutex);
  /// The set has been removed: forgets it, unless what was agreed on it before is still to be cut;
  /// then to be called again.
  void forget(int process_set) HVD_REQUIRES(engine_mutex);

 private:
  struct OfDomain {
    std::uint64_t cut = 0;      ///< cuts of the set that the domain takes part in
    std::uint64_t over = 0;     ///< how many of these are over, as far as the domain has said
    std::uint64_t awaited = 0;  ///< how many must be before the next cut: it is the first domain of
                                ///< one that the root has no part in
  };
  struct WorldSet {
    std::vector<std::vector<std::uint64_t>>
        open;                ///< cuts that this domain takes part in, by their batches
    std::uint64_t over = 0;  ///< cuts that are over here
    std::uint64_t told = 0;
    bool tells_at_once = false;  ///< the root has no part in some that are open here, so it waits
                                 ///< to hear of their end
    std::map<int, OfDomain> domains;  ///< of the root, by domain
  };
  [[nodiscard]] const Negotiator& table() const { return log_.table(); }
  void look_for_ends(WorldSet& set) HVD_REQUIRES(engine_mutex);
  bool open_places(int process_set, std::vector<std::uint64_t>& sequences)
      HVD_REQUIRES(engine_mutex, board_lock);

  const EngineParts& parts_;
  NegotiationLog& log_;
  EngineMutex& mutex_;
  Board& board_;
  std::map<int, WorldSet> world_
      HVD_GUARDED_BY(engine_mutex);  ///< of a leader: sets that span domains
  bool told_of_no_places_ HVD_GUARDED_BY(engine_mutex) = false;
};

}  // namespace hvd
