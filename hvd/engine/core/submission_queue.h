#pragma once
/// Keeps submissions that wait because their name is in flight, and counts those without a name. A
/// name that the library makes up is one of a few that are reused, so that what the ranks have said
/// of it need not be said again; that is why such submissions may have to wait. Under the engine's
/// mutex.
///
/// Submissions without names are matched by their order, and the order of two threads differs from
/// rank to rank. So each thread has its lane, with numbers of its own: one is of the thread that
/// has called `init()`, which is the same on all ranks, the other of one other thread at a time,
/// until that has ended. A third thread is refused, for nothing would tell the ranks which of the
/// two it is. The same holds for operations of the library's own, by their names.
// Tested in tests/hvd/engine/caller_threads_test.cc, tests/hvd/engine/fast_path_test.cc

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/core/ledger.h"
#include "hvd/negotiation/values/capabilities.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

class SubmissionQueue {
 public:
  /// Made-up names for each operation and process set. With as many in flight, others wait.
  static constexpr std::uint64_t kUnnamedNames = 256;

  /// `slots`: tensors that the ranks can know at once.
  explicit SubmissionQueue(std::uint32_t slots);

  // ---- numbers of unnamed submissions
  /// From now on the calling thread has the lane of the one that has called `init()`. Until then,
  /// the first one of all has it.
  void set_init_thread() HVD_REQUIRES(engine_mutex) {
    init_thread_ = CallerThread::here()->number();
  }
  /// Gives the calling thread's submission under `key` a name if it has none, and its lane's if it
  /// is one of the library's own. Returns its place if it had none. Throws InvalidArgument if
  /// another thread has the lane.
  std::optional<UnnamedPlace> name(UnitKey& key) HVD_REQUIRES(engine_mutex);
  /// Returns what `name` would make of a name that is empty or the library's own, written into
  /// `text` (room for kUnnamedText characters), and counts nothing. Empty if there is more to do.
  std::string_view find_name(int process_set, OpKind kind, std::string_view name,
                             std::span<char> text) HVD_REQUIRES(engine_mutex);
  /// Returns the place of the calling thread's next unnamed one; none if another has the lane.
  [[nodiscard]] std::optional<UnnamedPlace> next_place(int process_set, OpKind kind)
      HVD_REQUIRES(engine_mutex);
  /// Counts one more without a name, of the calling thread's lane.
  void use_name(int process_set, OpKind kind) HVD_REQUIRES(engine_mutex);
  /// Takes the calling thread's last one back, if it is still `name`.
  void take_back_name(int process_set, OpKind kind, std::string_view name)
      HVD_REQUIRES(engine_mutex);
  /// The one at `place` has ended on all ranks without having been submitted by all: the next is
  /// that again, also for those that lacked it. Takes out the later ones that wait, of which no
  /// other rank knows.
  std::deque<std::unique_ptr<Entry>> go_back(int process_set, OpKind kind, UnnamedPlace place)
      HVD_REQUIRES(engine_mutex);
  /// Returns what the next persistent operation without a name is called, and counts it. Throws
  /// InvalidArgument as `name`.
  std::string next_persistent_name(int process_set, OpKind kind) HVD_REQUIRES(engine_mutex);
  /// All ranks of the set have joined: numbers start again, as early ones have used fewer.
  void start_again(int process_set) HVD_REQUIRES(engine_mutex);
  /// The set has been removed.
  void forget_set(int process_set) HVD_REQUIRES(engine_mutex);

  // ---- submissions that wait
  void push(std::unique_ptr<Entry>&& entry) HVD_REQUIRES(engine_mutex);
  /// Takes the first that waits for a name that is free now; null if there is none.
  std::unique_ptr<Entry> pop_ready(Ledger& ledger) HVD_REQUIRES(engine_mutex);
  /// Puts one that was popped back in front.
  void put_back(std::unique_ptr<Entry> entry) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_ready(Ledger& ledger) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool empty() const HVD_REQUIRES(engine_mutex) { return waiting_.empty(); }
  [[nodiscard]] bool contains(const UnitKey& key) const HVD_REQUIRES(engine_mutex) {
    return waiting_.contains(key);
  }
  [[nodiscard]] bool contains_set(int process_set) const HVD_REQUIRES(engine_mutex);
  /// Takes all that wait out.
  std::deque<std::unique_ptr<Entry>> take_all() HVD_REQUIRES(engine_mutex);
  /// Calls `look` for each that waits.
  template <class Look>
  void for_each(Look look) const HVD_REQUIRES(engine_mutex) {
    for (const auto& [key, entries] : waiting_)
      for (const auto& entry : entries) look(*entry);
  }

  /// Returns how many process sets the queue counts for, which is to stay bounded.
  [[nodiscard]] std::size_t sets_kept() const HVD_REQUIRES(engine_mutex) {
    return joins_.size() + unnamed_.size() + persistent_.size() + library_.size();
  }

 private:
  /// The thread that has the lane that is not the init thread's.
  struct Owner {
    std::uint64_t number = CallerThread::kNone;
    std::weak_ptr<CallerThread> thread;
  };
  /// Submissions of one kind without names.
  struct Unnamed {
    std::array<std::uint64_t, 2> counts{};  ///< by lane: how many there were
    Owner owner;
    std::uint64_t& count(Lane lane) { return counts[static_cast<std::size_t>(lane)]; }
  };
  using PerKind = std::map<std::pair<int, OpKind>, Unnamed>;

  /// Returns the calling thread's lane; none if another thread has it.
  [[nodiscard]] std::optional<Lane> lane_here(const Owner& owner) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] std::optional<Lane> take_lane(Owner& owner) HVD_REQUIRES(engine_mutex);
  std::string_view name_in(Unnamed& unnamed, int process_set, OpKind kind, Lane lane,
                           std::span<char> text) HVD_REQUIRES(engine_mutex);

  const std::uint64_t names_;
  std::map<UnitKey, std::deque<std::unique_ptr<Entry>>> waiting_ HVD_GUARDED_BY(engine_mutex);
  std::uint64_t init_thread_ HVD_GUARDED_BY(engine_mutex) = CallerThread::kNone;
  PerKind unnamed_ HVD_GUARDED_BY(engine_mutex);
  PerKind persistent_ HVD_GUARDED_BY(engine_mutex);                ///< of persistent operations
  std::map<UnitKey, Owner> library_ HVD_GUARDED_BY(engine_mutex);  ///< of the library's operations
  std::map<int, std::uint64_t> joins_ HVD_GUARDED_BY(engine_mutex);  ///< how often a set has joined
};

}  // namespace hvd
