#pragma once
/// A Timeline is one rank's: what the engine notes becomes text in memory, and a thread of its own appends that to the common file every
/// 100 ms, sooner when there is much or something fails. The thread that notes writes no file, and waits for none. Where the memory is
/// full, whole operations are left out, and counted in the file.
/// Switched off, a note costs one relaxed load. Any thread may note. `start` throws InvalidArgument; a file that can no longer be written
/// ends the timeline with a warning; nothing else fails.
///
/// The slices mean: NEGOTIATE_<OP>: from submission until all ranks have agreed; within it MEMCPY_IN_FUSION_BUFFER, the copy that
/// the submitting thread makes of a tensor outside shared memory, then "rank r ready" (each rank has its own), and "rank q was last".
/// <OP>: until the result is there; within it WAIT_FOR_DATA until the batch is launched, then the transport (SHM_ALLREDUCE,
/// MPI_ALLGATHER, NCCL_BROADCAST...) and, of shared memory, MEMCPY_OUT_FUSION_BUFFER. The other transports copy out piece by piece, or
/// on the device; there it is a part of the transport's slice, which ends when the host knows of the end. Operations of a group, and of
/// a batch, have equal times.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/options.h"
#include "hvd/submission.h"
#include "hvd/timeline/timeline_events.h"
#include "hvd/timeline/timeline_file.h"
#include "hvd/topology.h"

namespace hvd {

class Timeline {
 public:
  /// Gives every rank's bytes to every rank, in rank order; collective.
  using Exchange = std::function<std::vector<Bytes>(const Bytes& mine)>;
  static constexpr std::size_t kCapacity = std::size_t{16} << 20;

  /// `capacity`: bytes of text that may wait to be written.
  explicit Timeline(std::size_t capacity = kCapacity) : capacity_(capacity) {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// Collective, with the same arguments: rank 0 makes the file anew; then the others open it, or, on a host that does not see it, one of
  /// their own. Throws InvalidArgument on every rank if one cannot, naming it.
  /// Clocks: exact within a host; between hosts as far as their wall clocks agree at this moment.
  void start(const std::string& path, const TimelineOptions& options, std::uint64_t max_bytes, const Topology& topology,
             const Exchange& exchange);
  /// Ends this rank's part: what was noted is in the file when it returns. Does nothing where none runs.
  void stop() noexcept;

  [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  static TraceTime now() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  // ---- notes
  struct Copy {
    TraceTime from = 0, to = 0;
  };
  /// Returns the number under which the rest is noted; 0: not at all. `once`: the name will not come back.
  std::uint64_t submitted(const Submission& submission, std::string_view name, bool once, TraceTime since, Copy copy);
  /// `last`: the rank that came last, -1 for none; `travels`: a batch will follow.
  void agreed(std::uint64_t id, int last, bool travels);
  void launched(std::uint64_t id, std::string_view backend);
  void copying_out(std::uint64_t id, TraceTime since);
  void finished(std::uint64_t id, const Status& status);
  /// Marks the cut of a batch, where cycles are marked.
  void cut(std::size_t tensors, std::int64_t bytes);

 private:
  void begin_writing(bool marks_cycles);
  void end_writer();
  void write_on();
  template <class Note>
  void note(const Note& note);

  const std::size_t capacity_;
  std::mutex control_;  // start and stop
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  TimelineEvents events_;
  std::uint64_t next_id_ = 1;
  bool hurry_ = false, stop_ = false;

  std::unique_ptr<TimelineFile> file_;  // the writer's own while it runs
  std::uint64_t max_bytes_ = 0;
  std::thread writer_;
};

}  // namespace hvd
