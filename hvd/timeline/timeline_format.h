#pragma once
/// A TimelineFormat writes what one rank's timeline says, as events of Chrome's trace format. It takes records and gives text. The
/// timeline's writer thread alone uses it; it touches no file and never fails.
///
/// A rank is a process (pid), a name is a track in it (tid) on which slices nest; names without an end (numbered ones, and those beyond
/// the first few thousand) share tracks, and say what they are in their arguments. Track 0 is the rank's own: cycles and counters.
// Tested in tests/hvd/timeline/timeline_test.cc

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hvd/types.h"

namespace hvd {

/// A TraceTime is a point of time: nanoseconds of the steady clock, which all processes of a host share.
using TraceTime = std::int64_t;

/// A TraceSubject is what is submitted.
struct TraceSubject {
  std::string name;   ///< as messages show it
  bool once = false;  ///< the name will not be used again
  OpKind kind = OpKind::Allreduce;
  int process_set = 0;
  std::size_t tensors = 0;
  std::string_view dtype;  ///< of all tensors, "mixed" if they differ
  Shape shape;             ///< of a single tensor
  std::int64_t bytes = 0;
};

struct TraceRecord {
  enum class Kind : std::uint8_t { Submitted, Agreed, Launched, CopyingOut, Finished, Cut };
  Kind kind = Kind::Submitted;
  bool good = true;           ///< Agreed: a batch will follow
  int rank = -1;              ///< Agreed: who came last
  std::uint64_t id = 0;       ///< of the operation; Cut: tensors
  TraceTime at = 0;           ///< Submitted: when the rank became ready
  TraceTime from = 0;         ///< Submitted: when it was submitted
  TraceTime copied_from = 0;  ///< Submitted: the copy into shared memory, if there was one; Cut: bytes
  TraceTime copied_to = 0;
  std::string_view backend = {};               ///< Launched; lives as long as the program
  std::unique_ptr<TraceSubject> subject = {};  ///< Submitted; Finished: `name` is what it failed with, null if it did not
};

/// `text` between quotes, as JSON wants it: no more than `most` bytes of it, what is not UTF-8 replaced.
std::string json_string(std::string_view text, std::size_t most = 256);

class TimelineFormat {
 public:
  /// `zero`: the point of this rank's clock that the file calls 0.
  TimelineFormat(int rank, TraceTime zero) : rank_(rank), zero_(zero) {}

  /// Returns the event that a file begins with, without a comma; `run` is found in it.
  static std::string first_event(std::string_view run, int ranks);
  /// Returns the event that ends a full file.
  std::string full_event(TraceTime now) const;
  /// All others are appended to `out`, each with ",\n" before it.
  void introduce(std::string_view label, std::string& out) const;
  void add(const TraceRecord& record, std::string& out);
  void dropped(std::uint64_t operations, TraceTime now, std::string& out) const;
  /// Counters that `add` has held back.
  void settle(std::string& out);
  /// Closes what is open.
  void end(TraceTime now, std::string& out);

 private:
  struct Track {
    std::uint32_t tid;
    bool shared;
    TraceTime last = 0;  ///< its latest event
  };
  struct Open {
    Track* track;
    OpKind kind;
    TraceRecord::Kind phase;
    std::string arguments;
    std::int64_t bytes;
  };
  Track& track_for(const TraceSubject& subject, std::string& out);
  Track& make_track(const std::string& key, std::string_view label, bool shared, std::string& out);
  void submitted(const TraceRecord& record, std::string& out);
  void close(Open& open, TraceTime at, std::string_view error, std::string& out);
  void count(TraceTime at, std::string& out);
  void put_counters(std::string& out);
  void begin(Track& track, std::string_view name, TraceTime at, std::string_view arguments, std::string& out) const;
  void finish(Track& track, TraceTime at, std::string& out, std::string_view arguments = {}) const;
  void mark(Track& track, std::string_view name, TraceTime at, std::string& out) const;
  [[nodiscard]] std::string time(TraceTime at) const;

  int rank_;
  TraceTime zero_;
  std::unordered_map<std::string, std::unique_ptr<Track>> tracks_;
  std::vector<Track*> free_shared_;
  std::unordered_map<std::uint64_t, Open> open_;
  std::uint32_t next_tid_ = 1;
  std::size_t queued_ = 0;    // submitted and not launched
  std::int64_t bytes_ = 0;    // launched and not finished
  TraceTime counted_at_ = 0;  // when the counters were last written
  TraceTime changed_at_ = 0;  // when they changed last
  bool changed_ = false;
};

}  // namespace hvd
