#pragma once
/// MpiTransport sends messages between the leaders of domains through MPI. Sends are buffered here until MPI is done with them; what
/// arrives is received in the background and given out whole, in the order in which each leader sent it. Nothing blocks; it is for one
/// thread at a time. It throws BackendError with MPI's own words, or for a message of more than 2^31 - 1 bytes.

#include <chrono>
#include <deque>
#include <vector>

#include "hvd/transport.h"
#include "ops/mpi/call.h"

namespace hvd {

class MpiTransport final : public Transport {
 public:
  /// `comm`: all ranks of the world, for these transports alone. `leaders[d]`: the rank that listens for domain d. `domain_of_rank`: for
  /// which domain each rank speaks. `domain`: this rank's.
  MpiTransport(MpiComm comm, std::vector<int> leaders, std::vector<int> domain_of_rank, int domain);
  ~MpiTransport() override;
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int domain() const override { return domain_; }
  int domains() const override { return static_cast<int>(leaders_.size()); }
  void send(int to, std::span<const std::byte> bytes) override;
  std::optional<Message> receive() override;

  /// For an orderly end: makes MPI send what is queued. False if `patience` ran out first; then it is forgotten with this object.
  bool drain(std::chrono::milliseconds patience);

 private:
  struct Outgoing {
    MPI_Request request = MPI_REQUEST_NULL;
    Bytes bytes;
  };
  struct Incoming {
    MPI_Request request = MPI_REQUEST_NULL;
    Message message;
  };
  void reap();
  void look_for_arrivals();

  MpiComm comm_;
  std::vector<int> leaders_;
  std::vector<int> domain_of_rank_;
  int domain_;
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
};

}  // namespace hvd
