#pragma once
/// Holds the streams of a virtual GPU: queues of operations, and when each of them runs. Operations
/// run inside the calls of the device's owner, mostly its queries, in an order that the schedule
/// chooses among what CUDA allows. Each stream has a clock (happens_before.h). One thread at a
/// time.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/host_cluster.h"

namespace hvd::gpu::test {

/// Says in which order a virtual GPU does what lies on its streams.
struct Schedule {
  enum class Kind : std::uint8_t {
    Delayed,  ///< each operation lets some queries pass, as `HostDevice::delay` says
    Late,     ///< as late as is legal: what a query waits for, and nothing else
    Random,   ///< any of what may run
    Eager,    ///< at once, as far as it can
    Starved,  ///< likewise, but for one stream, which runs when it is waited for
  };
  Kind kind = Kind::Delayed;
  std::uint64_t seed = 0;
};

/// Returns "late:17".
std::string text_of(const Schedule& schedule);
/// Returns the one that a text of this form names. Throws std::invalid_argument.
Schedule schedule_of(const std::string& text);
/// Returns the one that HVD_TEST_GPU_SCHEDULE names, for tests that ask for none; otherwise
/// `Delayed`.
Schedule schedule_of_environment();

/// Is put on a stream.
struct StreamOperation {
  UseOfMemory use = {};
  /// Does it and returns true, or false: not yet. `clock`: the stream's; what the operation comes
  /// to know of others joins it.
  std::function<bool(Clock& clock)> run;
  std::shared_ptr<HostCluster::SharedEvent> records = {};  ///< of the turn
  std::shared_ptr<HostCluster::SharedEvent> awaits = {};   ///< likewise
  std::uint64_t turn = 0;
};

/// Is the event's next turn.
StreamOperation recording_of(const std::shared_ptr<HostCluster::SharedEvent>& event);
/// Goes on when the last turn of the event has happened that is recorded now.
StreamOperation waiting_for(const std::shared_ptr<HostCluster::SharedEvent>& event);

class HostStreams {
 public:
  struct Stream;

  HostStreams(HappensBefore& order, int index);
  ~HostStreams();
  HostStreams(const HostStreams&) = delete;
  HostStreams& operator=(const HostStreams&) = delete;

  Schedule schedule;
  int delay = 0;  ///< of the `Delayed`

  Stream* create();
  /// Throws std::logic_error for what is none.
  Stream* known(CudaStream* stream);
  [[nodiscard]] bool is_idle(const Stream* stream) const;
  /// Returns what is known to whoever knows what has run on the stream.
  [[nodiscard]] const Clock& clock_of(const Stream* stream) const;
  void destroy(Stream* stream);
  [[nodiscard]] std::size_t size() const { return streams_.size(); }
  /// Returns "stream 2 of rank 0".
  [[nodiscard]] std::string name_of(const Stream* stream) const;

  void enqueue(Stream* stream, StreamOperation operation);
  /// Runs what the schedule lets run when somebody asks whether a turn of an event has happened;
  /// null: nobody asks for any.
  void pump(const std::shared_ptr<HostCluster::SharedEvent>& asked, std::uint64_t turn);

 private:
  struct Queued;
  bool step(Stream& stream);
  void run_all(const Stream* but);
  bool run_each_once();
  void run_some();
  /// Runs what the event waits for, as far as it can; returns whether anything has run.
  bool run_towards(const std::shared_ptr<HostCluster::SharedEvent>& event, std::uint64_t turn,
                   int depth);
  void run_delayed();
  [[nodiscard]] Stream* starved() const;

  HappensBefore& order_;
  const int index_;
  std::minstd_rand random_;
  std::vector<std::unique_ptr<Stream>> streams_;
  int created_ = 0;
  int in_vain_ = 0;  ///< queries since anything has run
};

}  // namespace hvd::gpu::test
