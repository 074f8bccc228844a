#pragma once
/// UcxPointToPoint is UCX's PointToPoint: one of the channels of a worker, by which the messages of
/// the backend and those of the leaders are told apart. UCX's tag has the channel, the sender and
/// the tag of the message. With the worker's error handling UCX 1.13 has no synchronous sends: a
/// synchronous one is done here when its connection has been flushed after it, so that none of its
/// bytes wait in this process. A flush that begins before the send is done may end before it: UCX
/// guarantees an order of remote memory accesses, not of tags. It throws RankFailed when a message
/// is awaited that a rank that has gone should send or take.
// Tested in tests/ops/p2p/transport_test.cc, tests/ops/p2p/backend_test.cc

#include <memory>
#include <vector>

#include "ops/p2p/point_to_point.h"
#include "ops/ucx/worker.h"

namespace hvd {

class UcxPointToPoint final : public PointToPoint {
 public:
  UcxPointToPoint(std::shared_ptr<UcxWorker> worker, unsigned channel)
      : worker_(std::move(worker)), channel_(channel) {}

  std::string_view name() const override { return "ucx"; }
  int rank() const override { return worker_->rank(); }
  int largest_tag() const override;
  Posted send(std::span<const std::byte> bytes, int to, int tag, SendMode mode) override;
  Posted receive(std::span<std::byte> bytes, int from, int tag) override;
  void test(std::span<Posted> posted, std::vector<Finished>& finished) override;
  std::optional<Claimed> claim(int tag) override;
  Posted receive_claimed(const Claimed& claimed, std::span<std::byte> bytes) override;
  bool drop(Posted& posted) noexcept override;
  void keep(std::shared_ptr<void> memory) noexcept override { worker_->keep(std::move(memory)); }
  bool flush() override { return worker_->flush(); }
  void look_again() override { worker_->progress(); }
  bool looks_again() const override { return true; }

 private:
  /// The calls that a message awaits: its request, and for a synchronous send a flush besides.
  struct Operation {
    void* request = nullptr;   ///< none: done
    void* flush = nullptr;     ///< likewise
    bool is_to_flush = false;  ///< once the request is done
    std::size_t bytes = 0;     ///< received
    bool is_lost = false;      ///< the other rank has gone
    bool is_needed = true;     ///< an error if it is lost; otherwise it is done then
  };
  Posted post(const Operation& operation, int peer, bool is_send);
  /// Returns what is to be awaited of what has begun, if anything.
  void* take_begin(ucs_status_ptr_t request, Operation& operation, int peer);
  void begin_flush(Operation& operation, int peer);
  [[nodiscard]] bool is_done(Operation& operation, const Posted& posted);
  /// Takes the end of a request. Returns whether that is as good as a good one.
  [[nodiscard]] bool take_end(void*& request, ucs_status_t status, Operation& operation,
                              const Posted& posted);
  void give_back(Posted& posted);

  std::shared_ptr<UcxWorker> worker_;
  const std::uint64_t channel_;
  std::vector<Operation> operations_;  // a handle is a place here, counted from 1
  std::vector<std::size_t> unused_;    // places
};

}  // namespace hvd
