#pragma once
/// TimelineEvents are those of one rank in Chrome's trace format, as text that is to be written. They are told what happens to operations,
/// by one thread at a time, and touch no file.
///
/// A rank is a process (pid), a name is a track in it (tid) on which slices nest; names without an end (numbered ones, and those beyond
/// the first few thousand) share tracks, and say what they are in their arguments. Track 0 is the rank's own: cycles and counters.
// Tested in tests/hvd/timeline/timeline_test.cc

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hvd/submission.h"

namespace hvd {

/// A TraceTime is a point of time: nanoseconds of the steady clock, which all processes of a host share.
using TraceTime = std::int64_t;

class TimelineEvents {
 public:
  /// `zero`: the point of this rank's clock that the file calls 0.
  explicit TimelineEvents(int rank = 0, TraceTime zero = 0) : rank_(rank), zero_(zero) {}

  /// Events, each with ",\n" before it. Who writes them takes them out.
  std::string text;

  void introduce(std::string_view label);
  /// Returns the event that ends a full file.
  [[nodiscard]] std::string full_event(TraceTime now) const;
  void submitted(std::uint64_t id, const Submission& submission, std::string_view name, bool once, TraceTime since, TraceTime copied_from,
                 TraceTime copied_to, TraceTime now);
  // What is said of an operation that is not under way is not heard.
  void agreed(std::uint64_t id, int last, bool travels, TraceTime now);
  void launched(std::uint64_t id, std::string_view backend, TraceTime now);
  void copying_out(std::uint64_t id, TraceTime since);
  void finished(std::uint64_t id, std::string_view error, TraceTime now);
  void cut(std::size_t tensors, std::int64_t bytes, TraceTime now);
  void left_out() { ++left_out_; }
  /// Writes counters that have changed.
  void settle();
  /// Closes what is open.
  void end(TraceTime now);

 private:
  struct Track {
    std::uint32_t tid = 0;
    bool shared = false;
    TraceTime last = 0;  ///< its latest event
  };
  enum class Phase : std::uint8_t { Submitted, Agreed, Launched, CopyingOut };
  struct Open {
    Track* track;
    OpKind kind;
    std::int64_t bytes;
    std::string arguments;
    Phase phase = Phase::Submitted;
  };
  Track& track_for(const Submission& submission, std::string_view name, bool once);
  Track& make_track(const std::string& key, std::string_view label, bool shared);
  void put(char phase, std::uint32_t tid, TraceTime at, std::initializer_list<std::string_view> rest);
  void put_on(Track& track, char phase, TraceTime at, std::initializer_list<std::string_view> rest);
  void begin(Track& track, TraceTime at, std::string_view name, std::string_view arguments = {});
  void mark(Track& track, TraceTime at, int rank, std::string_view what);
  void describe(std::string_view what, std::uint32_t tid, std::string_view argument);
  void enter(Open& open, Phase phase, TraceTime at, std::string_view name);
  void close(const Open& open, TraceTime at, std::string_view error);
  Open* find(std::uint64_t id, Phase phase);
  void changed(TraceTime at);
  void count(std::string_view name, std::string_view unit, std::int64_t value);

  int rank_;
  TraceTime zero_;
  std::unordered_map<std::string, Track> tracks_;
  std::vector<Track*> free_shared_;
  std::unordered_map<std::uint64_t, Open> open_;
  std::uint32_t next_tid_ = 1;
  std::int64_t queued_ = 0;  // submitted and not launched
  std::int64_t bytes_ = 0;   // launched and not finished
  std::int64_t left_out_ = 0, left_out_told_ = 0;
  TraceTime changed_at_ = 0, counted_at_ = 0;  // the counters
};

}  // namespace hvd
