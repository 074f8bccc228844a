#pragma once
/// Keeps submissions that wait because their name is in flight, and counts those without a name. A name that the library makes up is one of
/// a few that come back, so that what the ranks have said of it need not be said again; that is why such submissions may have to wait.
/// Under the engine's mutex.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "hvd/engine/ledger.h"
#include "hvd/negotiation/capabilities.h"

namespace hvd {

class SubmissionQueue {
 public:
  /// Made-up names for each operation and process set. With as many in flight, submissions wait their turn.
  static constexpr std::uint64_t kUnnamedNames = 256;

  /// `slots`: tensors that the ranks can know at once.
  explicit SubmissionQueue(std::uint32_t slots);

  // ---- numbers of unnamed submissions
  /// Returns what the next submission without a name is called, written into `text` (room for kUnnamedText characters).
  std::string_view next_name(int process_set, OpKind kind, std::span<char> text) HVD_REQUIRES(engine_mutex);
  /// Counts one more.
  void use_name(int process_set, OpKind kind) HVD_REQUIRES(engine_mutex) { ++unnamed_[{process_set, kind}]; }
  /// Takes the last one back, if it is still `name`.
  void take_back_name(int process_set, OpKind kind, std::string_view name) HVD_REQUIRES(engine_mutex);
  /// Returns what the next persistent operation without a name is called, and counts it.
  std::string next_persistent_name(int process_set, OpKind kind) HVD_REQUIRES(engine_mutex);
  /// All ranks of the set have joined: numbers start again, as ranks that joined early have used fewer.
  void start_again(int process_set) HVD_REQUIRES(engine_mutex);
  /// The set has been removed.
  void forget_set(int process_set) HVD_REQUIRES(engine_mutex);

  // ---- submissions that wait
  void push(std::unique_ptr<Entry> entry) HVD_REQUIRES(engine_mutex);
  /// Takes the first that waits for a name that is free now; null if there is none.
  std::unique_ptr<Entry> pop_ready(Ledger& ledger) HVD_REQUIRES(engine_mutex);
  /// Puts one that was popped back in front.
  void put_back(std::unique_ptr<Entry> entry) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_ready(Ledger& ledger) const HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool empty() const HVD_REQUIRES(engine_mutex) { return waiting_.empty(); }
  [[nodiscard]] bool contains(const UnitKey& key) const HVD_REQUIRES(engine_mutex) { return waiting_.contains(key); }
  [[nodiscard]] bool contains_set(int process_set) const HVD_REQUIRES(engine_mutex);
  template <class Look>
  void for_each(Look look) const HVD_REQUIRES(engine_mutex) {
    for (const auto& [key, entries] : waiting_)
      for (const auto& entry : entries) look(std::as_const(*entry));
  }
  /// Takes all that wait out.
  std::deque<std::unique_ptr<Entry>> take_all() HVD_REQUIRES(engine_mutex);
  /// Calls `look` for each that waits.
  template <class Look>
  void for_each(Look look) HVD_REQUIRES(engine_mutex) {
    for (auto& [key, entries] : waiting_)
      for (auto& entry : entries) look(*entry);
  }

  /// Of this queue, for what is to stay bounded: process sets that it counts for.
  [[nodiscard]] std::size_t sets_kept() const HVD_REQUIRES(engine_mutex) { return joins_.size() + unnamed_.size() + persistent_.size(); }

 private:
  const std::uint64_t names_;
  std::map<UnitKey, std::deque<std::unique_ptr<Entry>>> waiting_ HVD_GUARDED_BY(engine_mutex);
  std::map<std::pair<int, OpKind>, std::uint64_t> unnamed_ HVD_GUARDED_BY(engine_mutex);     ///< how many there were
  std::map<std::pair<int, OpKind>, std::uint64_t> persistent_ HVD_GUARDED_BY(engine_mutex);  ///< likewise, of persistent operations
  std::map<int, std::uint64_t> joins_ HVD_GUARDED_BY(engine_mutex);  ///< of a process set: how often all its ranks have joined
};

}  // namespace hvd
