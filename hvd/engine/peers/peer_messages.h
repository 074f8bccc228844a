#pragma once
/// PeerMessages are the sends and recvs of one rank, and what other ranks have sent it. A message
/// and a recv meet at the receiver: in the order in which each came, for the same tag and the rank
/// that the recv asks for. How the elements get there:
///
///   eager      small: with the first frame, before anybody asks; the send is done at once. As many
///              bytes of them as a rank has not
///   received
///              of one sender are bounded: what is beyond that is offered
///   got        offered, and the receiver reads it where it lies: one copy (hvd/exposed_memory.h)
///   in chunks  offered, and asked for: through the links, so many under way at once. Also what is
///              large and could be read, where the sender waits: then both ranks copy
///
/// All under the engine's mutex, which is free while much is copied. A failure ends the world, and
/// with it all that is pending.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "hvd/engine/core/engine_lock.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"
#include "hvd/engine/peers/meetings.h"
#include "hvd/engine/peers/peer_attention.h"
#include "hvd/engine/peers/peer_departures.h"
#include "hvd/engine/peers/peer_inbox.h"
#include "hvd/engine/peers/peer_links.h"
#include "hvd/exposed_memory.h"
#include "hvd/submission.h"

namespace hvd {

class PeerMessages {
 public:
  PeerMessages(const EngineParts& parts, EngineMutex& mutex);

  // ---- calls
  /// Sends a message. Returns its state; null if it is done. The call has been checked.
  std::shared_ptr<HandleState> send(PeerCall call) HVD_REQUIRES(engine_mutex);
  /// Receives one. Returns its state; null if it is done, and then `from` is the rank that sent it.
  std::shared_ptr<HandleState> receive(PeerCall call, int& from) HVD_REQUIRES(engine_mutex);

  /// Returns the calls of barrier_until.
  [[nodiscard]] Meetings& meetings() HVD_REQUIRES(engine_mutex) { return meetings_; }
  /// Returns who looks: while none of this rank's threads does, others ring for it.
  [[nodiscard]] PeerAttention& attention() { return attention_; }
  [[nodiscard]] const PeerAttention& attention() const { return attention_; }

  // ---- driving
  /// Does what can be done now, as far as this domain is concerned. The mutex, of which `lock` is
  /// the lock, may be free meanwhile, unless `copies` is false: then what takes long is left for
  /// later. Returns whether there was anything. Throws what a backend throws.
  bool advance(EngineLock& lock, bool copies = true) HVD_REQUIRES(engine_mutex);
  /// Does the rest. Throws what a transport throws.
  bool exchange(const Turn& turn) HVD_REQUIRES(engine_mutex);
  /// Returns whether `advance` might do something. Any thread.
  [[nodiscard]] bool has_news() const { return attention_.has_work() || links_.has_any(); }
  [[nodiscard]] bool has_unsent(const Turn& turn) HVD_REQUIRES(engine_mutex) {
    return parts_.peers != nullptr && links_.has_unsent(turn);
  }
  /// Returns whether no send or recv of this rank is pending.
  [[nodiscard]] bool is_idle() const HVD_REQUIRES(engine_mutex) {
    return inbox_.posted().empty() && receives_.empty() && sends_.empty();
  }
  /// Returns how many sends and recvs have ended that were pending.
  [[nodiscard]] std::uint64_t ended() const HVD_REQUIRES(engine_mutex) { return ended_; }

  // ---- ends
  /// This rank has called shutdown(): it receives nothing more but by the recvs that are pending.
  void leave() HVD_REQUIRES(engine_mutex);
  /// The rank has left: no message of it follows those that it has sent.
  void note_left(int rank) HVD_REQUIRES(engine_mutex);
  /// Ends all that is pending. `how`: with which state.
  void fail_all(const Status& how) HVD_REQUIRES(engine_mutex);
  /// Calls `report(text, since, reported)` for each that a thread waits for. `reported`: when it
  /// was last said to be late.
  template <class Report>
  void for_each_awaited(const Report& report) HVD_REQUIRES(engine_mutex) {
    const auto look = [&](auto& ops, bool are_sends) {
      for (auto& [key, op] : ops)
        if (op.pending->waited_for.load(std::memory_order_relaxed))
          report(describe(op.call, are_sends), op.since, op.reported);
    };
    look(inbox_.posted(), false);
    look(receives_, false);
    look(sends_, true);
  }

 private:
  /// A send that is not done.
  struct Send {
    PeerCall call;
    std::shared_ptr<HandleState> pending;
    std::optional<std::uint64_t> location;  ///< at which it is exposed
    std::uint64_t receive = 0;              ///< of the receiver, that wants chunks
    std::size_t sent = 0, got = 0;          ///< bytes
    Clock::time_point since = Clock::now(), reported = since;
  };
  /// The bytes of eager messages between this rank and another.
  struct Credit {
    std::uint64_t sent = 0,
                  taken = 0;  ///< of this rank's: sent, and received as far as the other has said
    std::uint64_t received = 0, told = 0;  ///< of the other's: received, and as this rank has said
  };
  using Receives = std::map<std::uint64_t, PeerReceive>;
  using Sends = std::map<std::uint64_t, Send>;

  void take(int from, const PeerFrameHead& head, const PeerPayload& payload)
      HVD_REQUIRES(engine_mutex);
  void arrived(int from, const PeerFrameHead& head, const PeerPayload& payload)
      HVD_REQUIRES(engine_mutex);
  void meet(PeerReceive receive, int from, const PeerFrameHead& head, const PeerPayload& payload)
      HVD_REQUIRES(engine_mutex);
  void chunk_came(const PeerFrameHead& head, const PeerPayload& payload) HVD_REQUIRES(engine_mutex);
  void take_answer(const PeerFrameHead& head, const PeerPayload& payload)
      HVD_REQUIRES(engine_mutex);
  bool feed(Send& send) HVD_REQUIRES(engine_mutex);
  bool feed_all() HVD_REQUIRES(engine_mutex);
  bool copy_some(EngineLock& lock) HVD_REQUIRES(engine_mutex);
  void count_taken(int from, const PeerFrameHead& head) HVD_REQUIRES(engine_mutex);
  void refuse(int from, std::uint64_t send, const Status& why) HVD_REQUIRES(engine_mutex);
  void end_those_of_gone() HVD_REQUIRES(engine_mutex);
  void end(HandleState& pending, PeerCall& call, Status status) HVD_REQUIRES(engine_mutex);
  void end_send(Sends::iterator send, Status status) HVD_REQUIRES(engine_mutex);
  void end_receive(Receives::iterator receive, Status status) HVD_REQUIRES(engine_mutex);
  void count_open(const PeerCall& call, int by) HVD_REQUIRES(engine_mutex);
  bool update() HVD_REQUIRES(engine_mutex);

  const EngineParts& parts_;
  EngineMutex& mutex_;
  ExposedMemory* exposed_ = nullptr;
  PeerLinks links_;
  PeerAttention attention_;
  PeerDepartures departures_ HVD_GUARDED_BY(engine_mutex);
  Meetings meetings_ HVD_GUARDED_BY(engine_mutex);
  std::vector<Credit> credits_ HVD_GUARDED_BY(engine_mutex);  ///< by rank
  PeerInbox inbox_ HVD_GUARDED_BY(engine_mutex);
  Receives receives_ HVD_GUARDED_BY(engine_mutex);  ///< that have met their message, by number
  Sends sends_ HVD_GUARDED_BY(engine_mutex);
  std::deque<std::uint64_t> copies_
      HVD_GUARDED_BY(engine_mutex);  ///< recvs that get their message, and no thread is at it
  std::set<std::uint64_t> fed_
      HVD_GUARDED_BY(engine_mutex);  ///< sends whose chunks have not all been sent
  std::uint64_t numbers_ HVD_GUARDED_BY(engine_mutex) = 0;
  std::uint64_t ended_ HVD_GUARDED_BY(engine_mutex) = 0;
};

}  // namespace hvd
