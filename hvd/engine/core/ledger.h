#pragma once
/// Keeps what this rank has submitted and not yet got back. Under the engine's mutex. An entry
/// belongs to the ledger from `admit` until it is taken out; its state only moves along `advance`.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "hvd/negotiation/table/negotiator.h"
#include "hvd/negotiation/values/capabilities.h"
#include "hvd/negotiation/values/unit_names.h"
#include "hvd/submission.h"
#include "hvd/timeline/timeline.h"

namespace hvd {

enum class EntryState : std::uint8_t { Waiting, Agreed, InFlight, Done, Failed };
enum class EntryEvent : std::uint8_t { Agree, Launch, Finish, Fail };

/// Waiting -> Agreed -> InFlight -> Done, and Failed from the first three; a submission without
/// tensors is done when agreed. Throws std::logic_error for any other pair: a bug here.
EntryState advance(EntryState state, EntryEvent event);

struct RepeatedOp;

/// One submission of this rank, on its way.
struct Entry {
  Submission submission;
  UnitKey key;
  Signature signature;
  std::shared_ptr<HandleState> pending = std::make_shared<HandleState>();
  EntryState state = EntryState::Waiting;
  std::vector<Backend*> backends;        ///< per tensor
  std::vector<std::uint64_t> locations;  ///< per tensor: what `prepare` returned
  UnitRef unit;                          ///< what records and batches call it, once it is bound
  bool announced = false;                ///< this rank has arrived at the unit's slot
  std::vector<bool>
      prepared;  ///< per tensor: its location is to be released, unless its batch is launched
  std::size_t unfinished = 0;  ///< tensors whose batch is not over
  std::size_t unqueued = 0;    ///< tensors whose batch is not all enqueued on the device
  std::vector<std::vector<std::int64_t>> rows;  ///< Allgather, Alltoall: by tensor, rows from each
  std::vector<std::vector<std::int64_t>>
      before;  ///< Alltoall: per tensor, rows of each rank's that go to the ranks before this one
  std::optional<UnnamedPlace> unnamed;  ///< of a submission without a name
  RepeatedOp* op = nullptr;             ///< the repeated operation it belongs to; null for most
  bool repeats = false;     ///< awaited, and nothing introduced: worth a repeated operation
  std::uint64_t trace = 0;  ///< its number in the timeline, 0 if it is not recorded there
  Timeline::Copy copied;    ///< when `prepare` copied, if the timeline wants to know
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
  std::chrono::steady_clock::time_point deadline =
      kNever;                                       ///< the world ends unless it has ended by then
  std::chrono::steady_clock::time_point agreed_at;  ///< when it left the state Waiting
  std::chrono::steady_clock::time_point reported = since;  ///< when it was last said to be late
};

DuplicateName duplicate(const UnitKey& key);

class Ledger {
  using Entries = std::map<UnitKey, std::unique_ptr<Entry>>;
  struct Hash {
    std::size_t operator()(const UnitRef& unit) const {
      return (std::size_t{unit.generation} << 32) | unit.id;
    }
  };
  using Units = std::unordered_map<UnitRef, Entry*, Hash>;

 public:
  /// An entry outside the ledger, with what it needs to be put back without new memory.
  struct Place {
    Entries::node_type entry;
    Units::node_type unit;
  };

  /// Takes the entry in. Throws DuplicateName if its key is in flight; then it stays the caller's.
  Entry& admit(std::unique_ptr<Entry>&& entry);
  /// Ties the entry to the unit by which records and batches speak of it: id and generation, for an
  /// id is given out again.
  void bind(Entry& entry, UnitRef unit);
  [[nodiscard]] Entry* find(UnitRef unit);
  [[nodiscard]] Entry* find(const UnitKey& key);
  /// Takes the entry out.
  std::unique_ptr<Entry> remove(Entry& entry);
  /// The same for an entry that is bound, and that will be put back under the same unit.
  Place take_out(Entry& entry);
  /// False, and nothing has happened, if its key or its unit is in flight.
  bool put_back(Place& place);

  /// An entry under the key is over and gone, but for its caller's `pending`, who may not know yet.
  void note_unseen(const UnitKey& key, const std::shared_ptr<HandleState>& pending) noexcept;
  /// Returns whether a caller still has what stands for the last one under the key, and has neither
  /// waited for it nor been told otherwise that it is over. Another one may be in flight on other
  /// ranks as long as that.
  [[nodiscard]] bool is_unseen(const UnitKey& key) const;

  [[nodiscard]] bool empty() const { return entries_.empty(); }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  /// Calls `look` for each entry; it must not take any out.
  template <class Look>
  void for_each(Look look) const HVD_REQUIRES(engine_mutex) {
    for (const auto& [key, entry] : entries_) look(*entry);
  }
  /// The entries, in no particular order.
  [[nodiscard]] std::vector<Entry*> all();

 private:
  static constexpr std::size_t kFewUnseen = 64;

  Entries entries_;
  Units by_unit_;
  std::map<UnitKey, std::weak_ptr<const HandleState>> unseen_;  ///< and some seen since, or gone
  std::size_t look_through_at_ = kFewUnseen;                    ///< so many of them
};

}  // namespace hvd
