#pragma once
/// Meeting is the port through which processes that were started apart become ranks: every rank's
/// bytes to all, a barrier, and gifts from one rank to others. It is what `init()` and the end of
/// `shutdown()` need; tensors never go this way. Collective calls are made by all ranks in the same
/// order, each by one thread at a time. A rank that dies meanwhile is RankFailed on all who wait
/// for it; what a call has thrown for once, all later ones throw.
// Tested in tests/ops/rendezvous/meeting_test.cc, tests/ops/bootstrap_mpi_test.cc

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "ops/shm/memory/shared_memory.h"

namespace hvd {

class Meeting {
 public:
  virtual ~Meeting() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Begins an `init()`. Not collective. Throws BackendError if this cannot be used any more.
  virtual void begin() = 0;
  /// Returns why this cannot be used any more; empty if it can.
  [[nodiscard]] virtual const std::string& broken() const = 0;
  /// Collective. Returns every rank's bytes, by rank. Waits without spinning while all live.
  virtual std::vector<Bytes> allgather(const Bytes& mine) = 0;
  /// Collective. Returns when all ranks have called it. Waits without spinning. Who returns may end
  /// its process.
  void barrier() { static_cast<void>(allgather({})); }
  /// Collective. Returns, by rank, the lowest rank of the same host: here by the hosts' names.
  virtual std::vector<int> find_hosts();
  /// For the thread that has the turn: the first of `ranks` gives `mine` to the others, who pass
  /// nothing. Waits without spinning, until `give_up`, which then ends it with BackendError; what a
  /// set of ranks is given under one tag comes in order.
  virtual Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                const std::function<bool()>& give_up) = 0;
};

/// Returns what names the host of this process, as far as its ranks can share memory.
std::string name_of_host();
/// Returns the sentence for a rank that has died.
std::string words_of_dead(int rank);

/// Peers watch the other ranks of this host while there is no board yet that tells who lives:
/// through a descriptor of each process, which the kernel marks when it ends. Used inside `init()`
/// and at the end of `shutdown()`, in the caller's thread. Owns the descriptors. Never fails: a
/// process that cannot be watched, on another host, in another pid namespace or under a kernel
/// without pidfd_open, is not.
class Peers {
 public:
  /// Names the kernel and the pid namespace of this process, where process ids mean the same; empty
  /// where it cannot be told.
  static std::string name_of_process_space();
  /// Returns what the others need to know to watch this process.
  static Bytes introduce();
  /// `all`: what each rank said of itself, by rank; `self` is this one.
  void watch(const std::vector<Bytes>& all, int self);
  /// Returns a rank whose process has ended, if there is one.
  [[nodiscard]] std::optional<int> find_dead() const;
  /// Returns whether that rank's process has ended; false for one that is not watched.
  [[nodiscard]] bool is_dead(int rank) const;

 private:
  struct Peer {
    int rank;
    FileDescriptor process;
  };
  static bool has_ended(const Peer& peer);
  std::vector<Peer> peers_;
};

/// KeyedMeeting is a Meeting by way of a store, in which each gift has a key of its own.
class KeyedMeeting : public Meeting {
 public:
  const std::string& broken() const override { return broken_; }
  Bytes give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                        const std::function<bool()>& give_up) override;

 protected:
  /// Sets a gift's value, which so many others take.
  virtual void put(const std::string& key, std::uint32_t takers, const Bytes& bytes) = 0;
  /// Returns a gift's value, or none after a moment.
  virtual std::optional<Bytes> try_take(const std::string& key) = 0;
  /// Throws it, as all later calls do.
  [[noreturn]] void fail(const Status& status);

  std::mutex one_at_a_time_;
  std::string broken_;
  Peers peers_;
  // how many in this world, by ranks and tag
  std::map<std::pair<std::vector<int>, int>, int> gifts_;
};

}  // namespace hvd
