#pragma once
/// A TimelineFile is the file of a timeline, to which all ranks of a host append. It is a JSON array (Chrome's trace format) with one event
/// a line, and ends in "\n]\n" whenever nobody writes: whoever appends holds the file's lock (flock) and writes over that end, in pieces of
/// at most `kPieceBytes`, each with a new end, by one pwrite each. Who reads it meanwhile holds the lock too, shared: a copy that is made
/// in several reads would else have an end in its middle, and systems let a read see half of a write. A process that is killed outside such
/// a call leaves the file as valid as it was; one that is killed within it may leave a torn line, which the next to append cuts off. It
/// owns the descriptor. Opening throws InvalidArgument that names the path; appending says what came of it.
// Tested in tests/hvd/timeline/timeline_test.cc

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace hvd {

class TimelineFile {
 public:
  static constexpr std::size_t kPieceBytes = 4096;
  /// No event may be longer.
  static constexpr std::size_t kMostEventBytes = kPieceBytes - 8;

  /// Opens the file. Starts it anew, with the event `first`, unless `run` (a text within `first`) is among its first bytes: then it has
  /// been begun for this run already.
  static TimelineFile begin(const std::string& path, std::string_view run, std::string_view first);
  /// Opens what another rank of the host has begun.
  static TimelineFile join(const std::string& path, std::string_view run);

  ~TimelineFile();
  TimelineFile(TimelineFile&& other) noexcept;
  TimelineFile& operator=(TimelineFile&&) = delete;

  enum class Outcome : std::uint8_t {
    Written,
    Busy,   ///< another process has held the lock for all of `patience`; nothing was written
    Full,   ///< the file says that it is full, and takes no more
    Broken  ///< the system refuses to write; `errno` says why
  };
  /// Appends events: each a JSON object without line breaks, with ",\n" before it. `full`: the event that is written when there is no
  /// room for more; it must end in the same `kFullMark` on all ranks.
  Outcome append(std::string_view events, std::uint64_t max_bytes, const std::string& full, std::chrono::milliseconds patience);
  static constexpr std::string_view kFullMark = R"("name":"the timeline is full: HVD_TIMELINE_MAX_BYTES"})";

 private:
  TimelineFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  static TimelineFile open(const std::string& path, bool create);
  [[nodiscard]] std::string read(std::uint64_t from, std::size_t bytes) const;
  [[nodiscard]] bool is_of(std::string_view run) const;
  bool lock(std::chrono::milliseconds patience);
  void unlock();
  [[nodiscard]] std::uint64_t size() const;
  bool write(std::string_view text, std::uint64_t at);
  bool find_end(std::uint64_t& end);
  [[noreturn]] void refuse(const char* what) const;

  int descriptor_;
  std::string path_;
};

}  // namespace hvd
