#pragma once
/// P2pTransport sends messages between the leaders of domains over a wire. Messages are kept here
/// until the wire is done with them; what arrives is received in the background and given out
/// whole, in the order in which each leader sent it. Nothing blocks; it is for one thread at a
/// time. It throws what the wire throws.

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "hvd/transport.h"
#include "ops/p2p/point_to_point.h"

namespace hvd {

class P2pTransport final : public Transport {
 public:
  /// `wire`: between all ranks of the world, for these transports alone. `leaders[d]`: the rank
  /// that listens for domain d. `domain_of_rank`: for which domain each rank speaks. `domain`: this
  /// rank's.
  P2pTransport(std::unique_ptr<PointToPoint> wire, std::vector<int> leaders,
               std::vector<int> domain_of_rank, int domain);
  ~P2pTransport() override;
  P2pTransport(const P2pTransport&) = delete;
  P2pTransport& operator=(const P2pTransport&) = delete;

  int domain() const override { return domain_; }
  int domains() const override { return static_cast<int>(leaders_.size()); }
  void send(int to, SharedBytes message) override;
  std::optional<Message> receive() override;
  bool has_unsent() override;

  /// For an orderly end: makes the wire send what is queued. False if `patience` ran out first, or
  /// a rank has gone; then it is forgotten with this object.
  bool drain(std::chrono::milliseconds patience);

 private:
  struct Outgoing {
    Posted posted;
    SharedBytes message;
  };
  struct Incoming {
    Posted posted;
    Message message;
  };
  [[nodiscard]] bool is_done(Posted& posted);
  void reap();
  void look_for_arrivals();

  std::unique_ptr<PointToPoint> wire_;
  std::vector<int> leaders_;
  std::vector<int> domain_of_rank_;
  int domain_;
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
  std::vector<Finished> finished_;  // kept for its memory
};

}  // namespace hvd
