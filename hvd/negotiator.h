#pragma once
/// Room card: the table that every rank of a domain keeps of what all ranks have said: names, ids, signatures, the queue of agreed
/// tensors. It changes by the records of the board's log alone, read by all in the same order, so all tables are equal: ids need
/// no authority, and a disagreement is found on every rank at the same record.
/// Under the engine's mutex. Never blocks; malformed records throw WireError.

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hvd/backend.h"
#include "hvd/planner.h"
#include "hvd/signature.h"
#include "hvd/topology.h"

namespace hvd {

/// What a submission is found by: the same name may be in flight for different operations and process sets.
struct UnitKey {
  int process_set = 0;
  OpKind kind = OpKind::Allreduce;
  std::string name;
  auto operator<=>(const UnitKey&) const = default;
};

/// A name that the library makes up for a submission without one. It is used once; the newline keeps it apart from users' names.
std::string unnamed(OpKind kind, std::uint64_t number);
bool is_unnamed(const std::string& name);
/// The name as messages show it.
std::string_view display_name(const std::string& name);

/// A set within one domain is agreed and cut there; a set that spans domains is agreed and cut by the root for all of them.
enum class Scope : std::uint8_t { Domain, World };

struct Unit {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  UnitKey key;
  Scope scope = Scope::Domain;
  std::uint32_t slots = 1;                   ///< consecutive slots from `id`, one per tensor
  std::vector<SharedSignature> signatures;   ///< by rank in the set; null until introduced
  std::list<std::uint32_t>::iterator usage;  ///< place in the least-recently-used list
  bool undecided = false;                    ///< ready in this domain, or agreed, and not yet cut
  std::uint64_t cut_at = 0;                  ///< the log's position when it was last cut
};

/// A batch that all its ranks are to run now.
struct CutBatch {
  std::uint64_t sequence = 0;  ///< equal on all ranks of the domain
  std::uint64_t order = 0;     ///< equal on all ranks of the scope
  Scope scope = Scope::Domain;
  PlannedBatch plan;
};

/// What reading a record brought about, for the engine to act on.
struct Outcomes {
  struct Agreed {
    std::uint32_t id;
    Status verdict;
    std::vector<bool> present;
  };
  struct HostReady {
    std::uint32_t id;
    std::vector<bool> present;
  };
  struct Introduced {
    std::uint32_t id;
    int rank;
  };
  std::vector<Agreed> agreed;
  std::vector<CutBatch> batches;
  std::vector<HostReady> host_ready;
  std::vector<Introduced> introduced;
  std::vector<int> left;  ///< ranks that called shutdown()

  [[nodiscard]] bool empty() const { return agreed.empty() && batches.empty() && host_ready.empty() && introduced.empty() && left.empty(); }
};

class Negotiator {
 public:
  /// `sets[0]` is the global set. `slots` bounds the tensors known at once.
  Negotiator(const Topology& topology, std::vector<ProcessSetInfo> sets, std::uint64_t fusion_threshold_bytes, std::uint32_t slots);

  [[nodiscard]] const ProcessSetInfo& process_set(int id) const;
  [[nodiscard]] bool has_process_set(int id) const;
  /// How many ranks of the set live in this domain.
  [[nodiscard]] std::uint32_t local_members(int process_set) const;
  [[nodiscard]] Scope scope_of(int process_set) const;

  [[nodiscard]] const Unit* find(const UnitKey& key) const;
  [[nodiscard]] const Unit& unit(std::uint32_t id) const { return units_.at(id); }
  [[nodiscard]] bool knows(std::uint32_t id) const { return units_.contains(id); }
  /// Whether `rank` (global) has introduced the unit with just this signature.
  [[nodiscard]] bool introduced(const Unit& unit, int rank, const Signature& signature) const;

  // ---- records; the caller has read the whole log and holds the board's lock
  /// `rank` says what it sends under `key`; gives the key an id where it has none. `generation_of(slot)` reads the board. None when
  /// all slots are taken: evict first.
  std::optional<Bytes> introduction(const UnitKey& key, int rank, const Signature& signature,
                                    const std::function<std::uint32_t(std::uint32_t)>& generation_of) const;
  /// The least recently used id that `evictable` lets go.
  std::optional<std::uint32_t> oldest(const std::function<bool(std::uint32_t)>& evictable) const;
  static Bytes eviction(std::uint32_t id);
  static Bytes agreement(std::uint32_t id, const std::vector<bool>& present);
  static Bytes host_readiness(std::uint32_t id, const std::vector<bool>& present);
  static Bytes cut_record(Scope scope);
  static Bytes leaving(int rank);

  /// Reads one record, which ends at `position` of the log.
  void apply(std::span<const std::byte> record, std::uint64_t position, Outcomes& outcomes);

  /// Whether a cut of the scope would bring anything.
  [[nodiscard]] bool has_agreed(Scope scope) const { return !queue(scope).empty(); }
  /// The process set of the scope's next cut; there must be one.
  [[nodiscard]] int next_process_set(Scope scope) const { return queue(scope).front().process_set; }
  /// The number the next batch will get.
  [[nodiscard]] std::uint64_t next_sequence() const { return sequence_ + 1; }
  [[nodiscard]] bool has_free_slots(std::uint32_t slots) const { return free_range(slots).has_value(); }

  [[nodiscard]] const std::vector<bool>& left() const { return left_; }
  [[nodiscard]] bool all_left() const;

 private:
  void apply_introduction(Reader& reader, Outcomes& outcomes);
  void apply_agreement(Reader& reader, Outcomes& outcomes);
  void apply_cut(Scope scope, std::uint64_t position, Outcomes& outcomes);
  void forget(std::uint32_t id);
  [[nodiscard]] std::optional<std::uint32_t> free_range(std::uint32_t slots) const;
  [[nodiscard]] Status judge(const Unit& unit) const;
  [[nodiscard]] std::vector<std::int64_t> total_bytes(const Unit& unit) const;
  [[nodiscard]] const std::deque<AgreedUnit>& queue(Scope scope) const { return queues_[static_cast<std::size_t>(scope)]; }
  std::vector<CutBatch> number(std::vector<PlannedBatch> plans, Scope scope) const;

  const Topology topology_;
  std::vector<ProcessSetInfo> sets_;
  std::vector<std::uint32_t> local_members_;
  std::uint64_t fusion_threshold_bytes_;
  std::uint32_t slot_capacity_;

  std::map<UnitKey, std::uint32_t> ids_;
  std::unordered_map<std::uint32_t, Unit> units_;
  std::list<std::uint32_t> usage_;                     // least recently used first
  std::map<std::uint32_t, std::uint32_t> free_slots_;  // first slot -> length
  std::deque<AgreedUnit> queues_[2];
  std::uint64_t sequence_ = 0;
  std::uint64_t orders_[2] = {0, 0};
  std::vector<bool> left_;
};

}  // namespace hvd
