#pragma once
/// A RepeatedOp has what a rank needs to repeat a small operation under the same name: the
/// ledger's entry with its place there, and a block that all ranks of the domain see, for input and
/// result. Such an operation needs no memory from the heap, and where all ranks arrive with one no
/// record in the log either: the last to arrive ends the round, or the leaders do. Under the
/// engine's mutex, but for `in_use` and the end of an operation.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "hvd/engine/core/ledger.h"
#include "hvd/fast_path_memory.h"
#include "hvd/routes.h"

namespace hvd {

struct RepeatedOp;

/// One tensor of a group. Nothing in it is owned.
struct SmallTensor {
  const void* input = nullptr;
  void* output = nullptr;
  std::span<const std::int64_t> shape;
};

/// A small operation whose caller waits for it. Nothing in it is owned.
struct SmallCall : OperationTerms {
  int process_set = 0;
  std::string_view name;
  DataType dtype = DataType::Float32;
  std::span<const std::int64_t> shape;  ///< of the input; a Barrier has none
  const void* input = nullptr;
  /// Allreduce of a group: its tensors, `Limit::GroupTensors` at most, all of type `dtype`. Empty
  /// for one tensor; else `shape`, `input` and `output` mean nothing.
  std::span<const SmallTensor> group;
  void* output = nullptr;  ///< null for Allgather, Alltoall, Reducescatter: `allocate` is asked
  /// Returns memory for so many rows; called once at most, under no lock, by the caller's thread or
  /// by the one that drives.
  void* (*allocate)(void* context, std::int64_t rows) = nullptr;
  void* context = nullptr;
  std::span<const std::int64_t> splits;  ///< Alltoall only: rows for each rank
  std::span<std::int64_t> received;      ///< Alltoall: becomes the rows from each; may be `splits`
  std::int64_t output_rows = -1;  ///< Allgather, Reducescatter: rows of the memory at `output`; -1:
                                  ///< `allocate` makes as many as come
  std::chrono::nanoseconds deadline{
      0};  ///< other than 0: it is to be submitted, as its entry alone is looked after
  /// The caller's memory of what was found for this call, so that repeating it looks nothing up;
  /// null: it has none.
  std::weak_ptr<RepeatedOp>* known = nullptr;
};

/// Returns the call that does what a submission of one tensor, or of none, would; of a group all
/// but its tensors. It refers to the submission. Of an alltoall the caller adds where the received
/// splits go.
[[nodiscard]] SmallCall call_of(const Submission& submission);
/// Returns whether a submission whose caller does not wait may have a repeated operation.
[[nodiscard]] bool is_small_unowned(const Submission& submission, int domains);
/// A TensorMemory says where a tensor of an allreduce is read and written.
struct TensorMemory {
  const void* input = nullptr;
  const void* output = nullptr;
  std::size_t bytes = 0;
  /// Returns whether input and output share some bytes and are not one.
  [[nodiscard]] bool overlaps_in_part() const;
};
/// Two tensors of a group: the result of `written` would lie where `other` is read or written.
struct GroupOverlap {
  std::size_t written = 0, other = 0;
};
/// The result of one tensor of a group is written when the next may still be read: it may overlap
/// its own input, and nothing else of the group. Returns two tensors of which that is not so, if
/// there are such. Allocates nothing for groups that a SmallCall may have.
[[nodiscard]] std::optional<GroupOverlap> find_overlap(std::span<const TensorMemory> group);
/// The location of a Barrier, which has no block: it says that the rank takes the fast path.
inline constexpr std::uint64_t kNoBlock = std::uint64_t{1} << 60;

struct RepeatedOp {
  /// The owner of its round: the caller; the fast path, which has arrived at the board; or the
  /// ledger, as of any other entry, because the round takes longer or is negotiated.
  enum class State : std::uint8_t { Idle, Arrived, Adopted };

  RepeatedOp() = default;
  RepeatedOp(const RepeatedOp&) = delete;
  RepeatedOp& operator=(const RepeatedOp&) = delete;
  /// Gives the block back, once the operation was dropped and its caller, who may still read the
  /// result, has gone. Any thread, under the engine's mutex or not.
  ~RepeatedOp() {
    if (block != nullptr && !is_pulled()) memory->drop(location);
    if (!sources.empty()) slots->finish_reading(sources);
  }

  std::atomic<bool> in_use{false};  ///< a caller has started it and not yet taken the result
  State state = State::Idle;
  Ledger::Place place;  ///< holds the entry while it is not in the ledger
  std::shared_ptr<HandleState> pending;

  // ---- what stays
  UnitKey key;
  std::shared_ptr<const ProcessSetInfo> set;
  std::vector<int> indices;     ///< of the set's ranks in the domain
  Route route = Route::AtSlot;  ///< one of three
  /// Returns whether each rank takes its result from the others' blocks, leased for the round.
  [[nodiscard]] bool is_pulled() const { return route == Route::EachItsPart; }
  /// Returns whether it is of all ranks of several domains: the leaders end its rounds
  /// (hvd/engine/leader/direct_path.h).
  [[nodiscard]] bool is_direct() const { return route == Route::Direct; }
  UnitRef unit;
  SharedSignature signature;  ///< the negotiator's: while the unit has it, nothing is introduced
  FastPathMemory* memory = nullptr;  ///< one of the next two; null for a Barrier
  SlotMemory* slots = nullptr;
  LeaderMemory* leaders = nullptr;
  BatchTraits traits;
  std::int64_t count = 0;      ///< elements of the input, of a group together
  std::uint64_t location = 0;  ///< of the block, or of the one that was leased last
  std::byte* block = nullptr;  ///< this rank's own, pinned or leased
  std::byte* note = nullptr;  ///< its inline data on the board, if inputs and results fit in there:
                              ///< the fewest cache lines to travel
  std::vector<std::int64_t> parts;  ///< Alltoall, one-sided Reducescatter: elements for each rank
  std::size_t block_bytes = 1;      ///< that any rank's block has to hold
  std::size_t input_bytes = 0;
  std::size_t result_at = 0;  ///< in the block, in bytes
  std::size_t result_bytes = 0;
  std::int64_t result_rows = 0;
  /// One tensor of a group: they lie one after the other in the block. `input` and `output` are of
  /// the last call.
  struct Member {
    std::size_t at = 0, bytes = 0;
    const void* input = nullptr;
    void* output = nullptr;
  };
  std::vector<Member> group;  ///< empty for one tensor

  // ---- what the ranks' table says of it, up to a position of the log
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  std::uint64_t judged_at = kNever;
  enum class Verdict : std::uint8_t {
    Invalid,
    Valid,  ///< the unit is known, with this rank's signature, and nobody of the set has joined or
            ///< left
    AllSame,  ///< and all ranks of the set have that signature
  };
  Verdict verdict = Verdict::Invalid;

  std::uint32_t number = kNoNumber;  ///< that the leaders called it by last (tensor_numbers.h)
  static constexpr std::uint32_t kNoNumber = ~std::uint32_t{0};

  // ---- of the call that is in flight
  std::optional<UnnamedPlace> unnamed;  ///< its place, if it has no name
  const void* input = nullptr;
  void* output = nullptr;
  void* (*allocate)(void* context, std::int64_t rows) = nullptr;
  void* context = nullptr;
  std::shared_ptr<void> owner;  ///< owns the memory, where the caller will not take the result
  bool is_handed_out = false;   ///< `pending` is somebody's who may keep it beyond this call
  bool is_alike = false;  ///< Alltoall: it ended in the block, where all ranks have the same splits
  bool is_lent = false;   ///< `location` is this round's
  bool is_in_place = false;  ///< a domain's only rank reads `input`, writes `output`: no copies
  std::vector<const std::byte*> sources;  ///< one-sided: blocks it gets its part from, until it has
  bool is_to_fetch = false;  ///< it is in the block, for its caller to ask for memory and copy

  /// Returns where this rank's result goes in a round that is not negotiated, and, unless
  /// `is_in_place`, where its input is.
  [[nodiscard]] std::byte* own_block() const {
    return is_in_place ? static_cast<std::byte*>(output) : block;
  }

  /// A round to wait for, and how.
  struct Awaited {
    std::uint32_t slot = 0;
    std::size_t ranks = 0;  ///< of the domain
    bool is_direct = false;
  };
  [[nodiscard]] Awaited awaited() const { return {unit.id, indices.size(), is_direct()}; }

  [[nodiscard]] bool fits(const SmallCall& call) const;

 private:
  [[nodiscard]] bool has_allowed_memory(const SmallCall& call) const;
};

class RepeatedOps {
 public:
  [[nodiscard]] std::shared_ptr<RepeatedOp> find(int process_set, OpKind kind,
                                                 std::string_view name) const;
  void add(const UnitKey& key, std::shared_ptr<RepeatedOp> op);
  /// Takes the repeated operation out, if there is one.
  std::shared_ptr<RepeatedOp> remove(const UnitKey& key);
  [[nodiscard]] std::size_t size() const { return repeated_ops_.size(); }
  /// Returns a key whose operation `is_stale`; null if there is none.
  template <class Predicate>
  [[nodiscard]] const UnitKey* find_if(Predicate is_stale) const {
    for (const auto& [key, op] : repeated_ops_)
      if (is_stale(*op)) return &key;
    return nullptr;
  }

 private:
  using View = std::tuple<int, OpKind, std::string_view>;
  static View view(const UnitKey& key) { return {key.process_set, key.kind, key.name}; }
  static View view(const View& key) { return key; }
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(const auto& key) const {
      const auto [set, kind, name] = view(key);
      return std::hash<std::string_view>()(name) ^ (static_cast<std::size_t>(set) << 8) ^
             (static_cast<std::size_t>(kind) << 3);
    }
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const { return view(a) == view(b); }
  };
  using Map = std::unordered_map<UnitKey, std::shared_ptr<RepeatedOp>, Hash, Equal>;
  Map repeated_ops_;
  mutable const Map::value_type* last_ =
      nullptr;  ///< what was found last: most often it is looked for again
};

}  // namespace hvd
