#pragma once
/// MpiPointToPoint is MPI's PointToPoint, over a communicator of its own, which it owns.
// Tested in tests/ops/p2p/transport_test.cc, tests/ops/p2p/backend_test.cc

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "ops/mpi/call.h"
#include "ops/p2p/point_to_point.h"

namespace hvd {

class MpiPointToPoint final : public PointToPoint {
 public:
  /// `comm`: all ranks of the world, in their order, for these messages alone.
  /// `is_over`: whether the world has ended in order by the time that this ends; null: it has.
  explicit MpiPointToPoint(MpiComm comm, std::shared_ptr<const std::atomic<bool>> is_over = nullptr)
      : comm_(std::move(comm)), is_over_(std::move(is_over)) {}
  /// A world that has failed leaves messages on the way, which the next one must not receive.
  ~MpiPointToPoint() override {
    if (is_over_ && !*is_over_) comm_.keep();
  }

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return comm_.rank(); }
  int largest_tag() const override { return comm_.largest_tag(); }
  /// Open MPI's TCP sends up to 64 KiB, with a header, at once. Of what is longer the receiver must
  /// first ask for the rest, and its word waits behind all that goes its way.
  std::size_t piece_bytes() const override { return std::size_t{63} << 10; }
  Posted send(std::span<const std::byte> bytes, int to, int tag, SendMode mode) override;
  Posted receive(std::span<std::byte> bytes, int from, int tag) override;
  void test(std::span<Posted> posted, std::vector<Finished>& finished) override;
  std::optional<Claimed> claim(int tag) override;
  Posted receive_claimed(const Claimed& claimed, std::span<std::byte> bytes) override;
  bool drop(Posted& posted) noexcept override;
  void keep(std::shared_ptr<void> memory) noexcept override;
  bool flush() override { return true; }  // the next call of MPI, be it MPI_Finalize, does it

 private:
  MpiComm comm_;
  const std::shared_ptr<const std::atomic<bool>> is_over_;
  // What `test` shows MPI; kept for their memory.
  std::vector<MPI_Request> requests_;
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace hvd
