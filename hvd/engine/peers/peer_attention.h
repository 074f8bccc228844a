#pragma once
/// PeerAttention is who looks for the messages of one rank: its own threads all the time, or
/// whoever another rank rings for. Counts the sends and recvs that somebody has to look after.
/// Changed under the engine's mutex; what it says any thread may ask. Nothing fails.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hvd/engine/core/parts.h"

namespace hvd {

class PeerAttention {
 public:
  explicit PeerAttention(const EngineParts& parts) : parts_(parts) {}

  /// A thread looks for news all the time from now on.
  void begin_to_look() HVD_REQUIRES(engine_mutex);
  /// It does no more. Returns whether `PeerMessages::advance` must follow, from which on others
  /// ring for this rank.
  [[nodiscard]] bool end_to_look() { return lookers_.fetch_sub(1) == 1 && open_.load() > 0; }

  /// There is one more send or recv that is not done, or one less. `elsewhere`: a rank of another
  /// domain may be in it.
  void count_open(bool elsewhere, int by) HVD_REQUIRES(engine_mutex);
  /// Messages of other domains are to be looked for whatever is open, until as many
  /// `ignore_elsewhere`.
  void expect_elsewhere() { elsewhere_.fetch_add(1); }
  void ignore_elsewhere() { elsewhere_.fetch_sub(1); }
  [[nodiscard]] bool awaits_elsewhere() const {
    return parts_.peers != nullptr && elsewhere_.load() > 0;
  }

  /// Says whether something is under way here that goes on by itself, or once there is room.
  void set_work(bool work) HVD_REQUIRES(engine_mutex);
  [[nodiscard]] bool has_work() const { return has_work_.load(std::memory_order_relaxed); }
  /// Says what this rank is to be rung for now. `for_room`: where nobody looks, also for room in a
  /// ring that was full. Returns whether that is more than before: then it must look again.
  bool update(bool for_room) HVD_REQUIRES(engine_mutex);

 private:
  const EngineParts& parts_;
  std::uint32_t call_ HVD_GUARDED_BY(engine_mutex) = 0;  ///< as Rings::set_call was told
  std::atomic<std::size_t> elsewhere_{0};
  std::atomic<int> lookers_{0};
  std::atomic<std::size_t> open_{0};
  std::atomic<bool> has_work_{false};
};

}  // namespace hvd
