#pragma once
/// The table that every rank of a domain keeps of what all ranks have said: names, ids, signatures,
/// the queue of agreed tensors. It changes by the records of the board's log alone, read by all in
/// the same order, so all tables are equal: ids need no authority, and a disagreement is found on
/// every rank at the same record. Under the engine's mutex. Never blocks; malformed records throw
/// WireError.

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "hvd/backend.h"
#include "hvd/negotiation/table/agreed_queues.h"
#include "hvd/negotiation/table/planner.h"
#include "hvd/negotiation/values/pledges.h"
#include "hvd/negotiation/values/process_sets.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/unit.h"
#include "hvd/negotiation/values/unit_names.h"
#include "hvd/topology.h"

namespace hvd {

/// A batch that all its ranks are to run now.
struct CutBatch {
  std::uint64_t sequence = 0;  ///< equal on all ranks of the domain; which place of the board it
                               ///< has; 0 where none takes part
  std::uint64_t order = 0;     ///< equal on all ranks of the process set, which count their batches
  Scope scope = Scope::Domain;
  PlannedBatch plan;
};

/// The outcomes of a record that was read, for the engine to act on.
struct Outcomes {
  struct Agreed {
    std::uint32_t id;
    Status verdict;
    Agreement what;
  };
  struct HostReady {
    std::uint32_t id;
    Agreement what;
  };
  struct Introduced {
    std::uint32_t id;
    Run ranks;
  };
  std::vector<Agreed> agreed;
  std::vector<CutBatch> batches;
  std::vector<HostReady> host_ready;
  std::vector<Introduced> introduced;
  struct JoinedUp {
    int process_set, rank;
  };
  struct Voided {
    std::vector<UnitRef> units;  ///< forgotten already
    Status status;
  };
  std::vector<std::uint32_t> closed;  ///< of a process set that was removed: nobody may arrive any
                                      ///< more, and whoever has, has failed
  std::vector<Voided> voided;  ///< the ranks have submitted different operations under one name
  std::vector<JoinedUp>
      joined;             ///< what the domain was ready for without these ranks has been said
  std::vector<int> left;  ///< ranks that called shutdown()
  Pledges pledges;        ///< of the rank that left
  int lingering = 0;      ///< how many ranks more have sends or recvs pending as they leave: 1, -1
  std::vector<std::uint32_t> doubted;  ///< the root is asked whether they can still be complete

  [[nodiscard]] bool empty() const {
    return agreed.empty() && batches.empty() && host_ready.empty() && introduced.empty() &&
           joined.empty() && left.empty() && lingering == 0 && voided.empty() && doubted.empty();
  }
};

class Negotiator : public Records {
 public:
  /// `sets[0]` is the global set. `slots` bounds known tensors. `groups_alone`: as in `cut`.
  /// `world`: its name, for messages; empty: the global one.
  Negotiator(const Topology& topology, std::vector<ProcessSetInfo> sets,
             std::uint64_t fusion_threshold_bytes, std::uint32_t slots, bool groups_alone = false,
             std::string world = {});

  /// Returns the process sets, which are made and removed by agreement (OpKind::Control). Any
  /// thread, as far as ProcessSets says so.
  [[nodiscard]] const ProcessSets& sets() const { return sets_; }
  /// Forgets removed sets that are neither `in_use` nor those of a unit.
  void bury_removed(const std::function<bool(int)>& in_use);
  /// Returns how many names are known, for what is to stay bounded.
  [[nodiscard]] std::size_t units_kept() const { return units_.size(); }

  [[nodiscard]] const Unit* find(const UnitKey& key) const;
  [[nodiscard]] const Unit& unit(std::uint32_t id) const { return units_.at(id); }
  [[nodiscard]] bool knows(std::uint32_t id) const { return units_.contains(id); }
  /// Returns whether these ranks (global) have introduced the unit with just this signature.
  [[nodiscard]] bool introduced(const Unit& unit, const Runs& ranks,
                                const Signature& signature) const;
  [[nodiscard]] bool introduced(const Unit& unit, int rank, const Signature& signature) const {
    return introduced(unit, Runs{{rank, 1}}, signature);
  }

  /// Returns whether all ranks of the set but `absent` (ascending) have introduced the unit.
  [[nodiscard]] bool has_introduced_all(const Unit& unit, const std::vector<int>& absent) const;

  // ---- records; the caller has read the whole log and holds the board's lock
  /// `ranks` say what they send under `key`; gives the key an id where it has none.
  /// `generation_of(slot)` reads the board. None when all slots are taken: evict first.
  std::optional<Bytes> introduction(
      const UnitKey& key, const Runs& ranks, const Signature& signature,
      const std::function<std::uint32_t(std::uint32_t)>& generation_of) const;
  std::optional<Bytes> introduction(
      const UnitKey& key, int rank, const Signature& signature,
      const std::function<std::uint32_t(std::uint32_t)>& generation_of) const {
    return introduction(key, Runs{{rank, 1}}, signature, generation_of);
  }
  /// The least recently used id that `evictable` lets go.
  std::optional<std::uint32_t> oldest(const std::function<bool(std::uint32_t)>& evictable) const;

  /// Reads one record, which ends at `position` of the log.
  void apply(std::span<const std::byte> record, std::uint64_t position, Outcomes& outcomes);

  /// Returns what is agreed and waits to be cut.
  [[nodiscard]] const AgreedQueues& agreed() const { return agreed_; }
  [[nodiscard]] bool has_free_slots(std::uint32_t slots) const {
    return free_slots_.find(slots).has_value();
  }

  [[nodiscard]] bool any_left() const { return !left_.empty(); }
  [[nodiscard]] bool have_all_left() const {
    return left_.size() == static_cast<std::size_t>(topology_.size);
  }
  /// All ranks have left, none has a send or recv pending, and nothing more will be agreed.
  [[nodiscard]] bool all_left() const;
  /// Ranks of the key's set that have left without having joined, in the order in which they left.
  [[nodiscard]] std::vector<int> leavers_of(const UnitKey& key) const;
  /// An operation that could not take place because a rank had left. In a world with a name: that
  /// it has left.
  struct Refusal {
    int left_rank;
    std::string text;
  };
  /// Returns the first of them: what comes to grief afterwards may do so because of it.
  [[nodiscard]] const std::optional<Refusal>& first_refusal() const { return first_refusal_; }
  /// Returns whether `rank`, now left, still takes part in a later round of a unit of one domain.
  [[nodiscard]] bool has_pledged(int rank, const UnitKey& key) const {
    return pledged_.contains(key, rank);
  }

  /// Returns the unit that removes the set, if a rank was about to remove it last; else null.
  [[nodiscard]] const Unit* removal_of(int process_set) const;
  /// The units of a set; those of one name.
  [[nodiscard]] std::vector<const Unit*> units_of(int process_set) const;
  [[nodiscard]] std::vector<const Unit*> units_of(int process_set, const std::string& name) const;
  template <class Look>
  void for_each_unit(Look look) const {
    for (const auto& [id, unit] : units_) look(unit);
  }
  /// Returns whether the set has had units of several kinds under the name, and has one still.
  [[nodiscard]] bool is_ambiguous(int process_set, const std::string& name) const {
    return ambiguous_.contains({process_set, name});
  }

 private:
  const ProcessSetInfo& known_set(int id) const;
  void apply_introduction(Reader& reader, Outcomes& outcomes);
  void apply_agreement(Reader& reader, std::uint64_t position, Outcomes& outcomes);
  void apply_cut(Reader& reader, std::uint64_t position, Outcomes& outcomes);
  void apply_conflict(Reader& reader, Outcomes& outcomes);
  void apply_leaving(Reader& reader, Outcomes& outcomes);
  void apply_refusal(Reader& reader, Outcomes& outcomes);
  void apply_control(const Unit& unit, Agreement& what, std::uint64_t position, Outcomes& outcomes);
  void forget(std::uint32_t id);
  Unit& known_unit(std::uint32_t id);

  const Topology topology_;
  const std::string world_;
  ProcessSets sets_;
  AgreedQueues agreed_;

  std::map<UnitKey, std::uint32_t> ids_;
  std::unordered_map<std::uint32_t, Unit> units_;
  std::set<std::pair<int, std::string>> ambiguous_;
  std::list<std::uint32_t> usage_;  // least recently used first
  SlotRanges free_slots_;
  std::vector<int> left_;  ///< in the order of their leaving
  int lingering_ = 0;      ///< ranks of this domain that leave with sends or recvs pending
  std::optional<Refusal> first_refusal_;
  PledgeTable pledged_;  // of units of one domain
  bool ended_ = false;
};

}  // namespace hvd
