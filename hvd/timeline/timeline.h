#pragma once
/// A Timeline is one rank's: what the engine notes becomes text in memory, and a thread of its own
/// appends that to the common file every 100 ms, sooner when there is much or something fails. The
/// thread that notes writes no file, and waits for none. Where the memory is full, whole operations
/// are left out, and counted in the file. Switched off, a note costs one relaxed load. Any thread
/// may note. `start` throws InvalidArgument; a file that can no longer be written ends the timeline
/// with a warning; nothing else fails.
///
/// A rank is a process (pid), a name is a track in it (tid) on which slices nest; names without an
/// end (numbered ones, and those beyond the first few thousand) share tracks, and say what they are
/// in their arguments. Track 0 is the rank's own: cycles and counters.
///
/// The slices mean: NEGOTIATE_<OP>: from submission until all ranks have agreed; within it
/// MEMCPY_IN_SHARED_MEMORY, the copy that the submitting thread makes of a tensor outside shared
/// memory, then "rank r ready" (each rank has its own), and "rank q was last". <OP>: until the
/// result is there, which it is at once where nothing has to travel (BARRIER); within it
/// WAIT_FOR_DATA until the batch is launched, MEMCPY_IN_FUSION_BUFFER, the
/// transport (SHM_ALLREDUCE, MPI_ALLGATHER, NCCL_BROADCAST...) and MEMCPY_OUT_FUSION_BUFFER. The
/// two copies have no length where there are none, or an early one, and where the transport makes
/// them piece by piece, or on the device: its slice, which ends when the host knows of the end, has
/// their time. Operations of a group, and of a batch, have equal times.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "hvd/options.h"
#include "hvd/submission.h"
#include "hvd/timeline/timeline_file.h"
#include "hvd/topology.h"

namespace hvd {

/// A TraceTime is a point of time: nanoseconds of the steady clock, one for a host.
using TraceTime = std::int64_t;

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

  /// Collective, with the same arguments: rank 0 makes the file anew; then the others open it, or,
  /// on a host that does not see it, one of their own. Throws InvalidArgument on every rank if one
  /// cannot, naming it. Clocks: exact within a host; between hosts as far as their wall clocks
  /// agree at this moment.
  void start(const std::string& path, const TimelineOptions& options, std::uint64_t max_bytes,
             const Topology& topology, const Exchange& exchange);
  /// Ends this rank's part: what was noted is then in the file. Does nothing where none runs.
  void stop() noexcept;

  [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  static TraceTime now() noexcept {
    return std::chrono::steady_clock::now().time_since_epoch().count();
  }

  // ---- notes
  struct Copy {
    TraceTime from = 0, to = 0;
  };
  /// Returns the number under which the rest is noted; 0: not at all. `once`: the name will not
  /// come back.
  std::uint64_t submitted(const Submission& submission, std::string_view name, bool once,
                          TraceTime since, Copy copy);
  /// `last`: the rank that came last, -1 for none; `travels`: a batch will follow.
  void agreed(std::uint64_t id, int last, bool travels);
  void launched(std::uint64_t id, std::string_view backend);
  void copying_out(std::uint64_t id, TraceTime since);
  void finished(std::uint64_t id, const Status& status);
  /// Marks the cut of a batch, where cycles are marked.
  void cut(std::size_t tensors, std::int64_t bytes);

 private:
  struct Track {
    std::uint32_t tid = 0;
    bool shared = false;
    TraceTime last = 0;  ///< its latest event
  };
  enum class Phase : std::uint8_t { Submitted, Agreed, Launched, CopyingOut };
  struct Operation {
    Track* track;
    OpKind kind;
    std::int64_t bytes;
    std::string arguments;
    Phase phase = Phase::Submitted;
  };
  /// A Run is what is known of the operations of one file.
  struct Run {
    int rank = 0;
    TraceTime zero = 0;  ///< the point of this rank's clock that the file calls 0
    std::string text;    ///< events that are to be written, each with ",\n" before it
    std::unordered_map<std::string, Track> tracks;
    std::vector<Track*> free_shared;
    std::uint32_t next_tid = 1;
    std::unordered_map<std::uint64_t, Operation> open;
    std::int64_t queued = 0;  ///< submitted and not launched
    std::int64_t bytes = 0;   ///< launched and not finished
    std::int64_t left_out = 0, left_out_told = 0;
    TraceTime changed_at = 0, counted_at = 0;  ///< the counters
    bool hurry = false, stop = false;          ///< for the writer
  };

  void begin_writing(bool marks_cycles);
  void end_writer();
  void write_on();

  // Require the mutex.
  /// Returns null where there is none of this number, or in another phase: it is of an earlier
  /// file, or another batch of the same group.
  Operation* find(std::uint64_t id, Phase phase);
  Track& track_for(const Submission& submission, std::string_view name, bool once);
  Track& make_track(const std::string& key, std::string_view label, bool shared);
  void put(char phase, std::uint32_t tid, TraceTime at,
           std::initializer_list<std::string_view> rest);
  void put_on(Track& track, char phase, TraceTime at,
              std::initializer_list<std::string_view> rest = {});
  void begin(Track& track, TraceTime at, std::string_view name, std::string_view arguments = {});
  void mark(Track& track, TraceTime at, int rank, std::string_view what);
  void describe(std::string_view what, std::uint32_t tid, std::string_view argument);
  void enter(Operation& operation, Phase phase, TraceTime at, std::string_view name);
  void close(const Operation& operation, TraceTime at, std::string_view error);
  void changed(TraceTime at);
  void count();
  void put_counter(std::string_view name, std::string_view unit, std::int64_t value);
  [[nodiscard]] std::string full_event() const;
  void hurry();

  const std::size_t capacity_;
  std::mutex control_;  // start and stop
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  Run run_;
  std::uint64_t next_id_ = 1;

  std::unique_ptr<TimelineFile> file_;  // the writer's own while it runs
  std::uint64_t max_bytes_ = 0;
  std::thread writer_;
};

}  // namespace hvd
