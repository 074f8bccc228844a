#pragma once
/// StoreServer is where the ranks of a job meet: rank 0 holds it, and it is gone with rank 0. It
/// owns a socket, the connections and one thread, which sleeps while nobody says anything. Who
/// connects is a stranger until it has proved that it knows the job's key: until then it has some
/// seconds and a few hundred bytes, and whatever it does harms nobody. Ranks that do not come until
/// the deadline are named to all who have.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <atomic>
#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <thread>

#include "ops/rendezvous/sockets.h"
#include "ops/rendezvous/store.h"

namespace hvd {

class StoreServer {
 public:
  struct Options {
    int size = 1;  ///< ranks
    Digest key{};
    std::chrono::milliseconds patience{60'000};  ///< for all to come
    std::chrono::milliseconds remark{10'000};  ///< when those that are missing are named in the log
    std::string place;                         ///< what it is called in messages
    std::string knob;                          ///< what sets `patience`
  };
  /// Takes `listener` over.
  StoreServer(FileDescriptor listener, Options options);
  /// Connections end.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  static constexpr int kStranger = -1;
  struct Peer {
    FileDescriptor connection;
    Nonce nonce{};
    Deadline deadline;           ///< of a stranger
    std::optional<Hello> hello;  ///< of one that has proved to be of the job, and is no rank yet
    int rank = kStranger;
    FrameReader in;
    Bytes out;
    bool ends = false;  ///< when `out` is sent
    bool gone = false;
  };
  void run();
  void wait();
  void accept_all();
  void make_room();
  void read(Peer& peer);
  void hear(Peer& peer, const Frame& frame);
  void introduce(Peer& peer, const Frame& frame);
  void take_in(Peer& peer);
  void deliver();
  void write(Peer& peer);
  void keep_time();
  void sweep();
  [[nodiscard]] bool is_resting() const;
  [[nodiscard]] int time_to_wait() const;
  [[nodiscard]] bool is_next(const Peer& peer) const;

  const Options options_;
  FileDescriptor listener_;
  FileDescriptor wake_;
  std::atomic<bool> ends_{false};
  // Of the thread.
  Store store_;
  std::list<Peer> peers_;
  const Deadline begin_;
  Deadline accepts_at_ = Deadline::min();  ///< when it looks for connections again: this process
                                           ///< may have no descriptor left for one
  bool has_remarked_ = false;
  bool is_closed_ = false;  // all have come, or it has failed
  std::thread thread_;
};

}  // namespace hvd
