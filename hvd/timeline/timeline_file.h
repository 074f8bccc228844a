#pragma once
/// A TimelineFile is the file of a timeline, to which all ranks of a host append: a JSON array
/// (Chrome's trace format) with one event a line, which ends in "\n]\n" whenever nobody writes.
/// Whoever appends holds the file's lock (flock) and writes over that end. Who reads it meanwhile
/// holds the lock too, shared: a copy that is made in several reads would else have an end in its
/// middle, and systems let a read see half of a write. A process that is killed within the call
/// that writes may leave a torn line, which the next to append cuts off.
// Tested in tests/hvd/timeline/timeline_test.cc

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hvd {

class TimelineFile {
 public:
  /// No event may be longer: where a torn file is whole is looked for within twice as much.
  static constexpr std::size_t kMostEventBytes = 4096;

  /// Opens the file. Starts it anew, with the event `first`, unless it begins so: then another rank
  /// of this run has started it. Throws InvalidArgument that names the path.
  TimelineFile(const std::string& path, std::string_view first);
  ~TimelineFile();
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  enum class Outcome : std::uint8_t {
    Written,
    Busy,   ///< another process has held the lock for seconds; nothing was written
    Full,   ///< the file says that it is full, and takes no more
    Broken  ///< the system refuses to write; `errno` says why
  };
  /// Appends events: each a JSON object without line breaks, with ",\n" before it. `full`: the
  /// event that is written when there is no room for more; it must end in the same `kFullMark` on
  /// all ranks.
  Outcome append(std::string_view events, std::uint64_t max_bytes, std::string_view full);
  static constexpr std::string_view kFullMark =
      R"("name":"the timeline is full: HVD_TIMELINE_MAX_BYTES"})";

 private:
  bool lock();
  void unlock();
  bool write(std::string_view text, std::uint64_t at);
  [[nodiscard]] std::optional<std::string> read(std::uint64_t from, std::size_t bytes) const;
  Outcome append_locked(std::string_view events, std::uint64_t max_bytes, std::string_view full);

  int descriptor_;
};

}  // namespace hvd
