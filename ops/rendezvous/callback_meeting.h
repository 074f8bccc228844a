#pragma once
/// CallbackMeeting is the Meeting of ranks that reach a store of somebody else's (hvd/world.h,
/// Rendezvous). In each round rank 0 gathers what the others set, one key each, and sets one for
/// all: the store sees as many requests as there are ranks. It waits for a rank for as long as its
/// patience lasts, and on its own host no longer than that lives. It fails with RankFailed or
/// BackendError, and stays failed.
// Tested in tests/ops/rendezvous/callback_meeting_test.cc

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/world.h"
#include "ops/rendezvous/meeting.h"

namespace hvd {

class CallbackMeeting final : public KeyedMeeting {
 public:
  /// Collective. Throws InvalidArgument for a wrong rendezvous, or where a rank of this name and
  /// number has been there; Mismatch where sizes differ; BackendError, which names them, if ranks
  /// have not come after `patience`.
  CallbackMeeting(Rendezvous rendezvous, std::chrono::milliseconds patience);

  int rank() const override { return store_.rank; }
  int size() const override { return store_.size; }
  void begin() override {}
  std::vector<Bytes> allgather(const Bytes& mine) override;

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(patience_).count(); }
  void put(const std::string& key, std::uint32_t /*takers*/, const Bytes& bytes) override {
    set(key, bytes);
  }
  std::optional<Bytes> try_take(const std::string& key) override;
  void announce();
  void agree_on_size();
  [[nodiscard]] std::string key(const std::string& what) const { return store_.name + "/" + what; }
  void set(const std::string& what, const Bytes& bytes);
  /// Returns the value, or none after a moment.
  std::optional<Bytes> try_get(const std::string& what, std::chrono::milliseconds time);
  /// Waits for what the rank is to set. Throws RankFailed where it dies; none after the deadline.
  std::optional<Bytes> await(const std::string& what, int from, Clock::time_point deadline);
  std::vector<Bytes> gather(const std::string& round, const Bytes& mine,
                            Clock::time_point deadline);

  const Rendezvous store_;
  const std::chrono::milliseconds patience_;
  std::uint64_t rounds_ = 0;  // allgathers that have ended
};

}  // namespace hvd
