#include "hvd/timeline/timeline_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr std::string_view kEnd = "\n]\n";
constexpr std::size_t kTail = std::size_t{64} << 10;  // of a torn file: many pieces long
constexpr std::size_t kHead = 1024;
constexpr auto kLockPatience = 10s;

}  // namespace

TimelineFile::TimelineFile(TimelineFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

TimelineFile::~TimelineFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void TimelineFile::refuse(const char* what) const {
  throw InvalidArgument(formatted("the timeline '{}' cannot be written: {}", path_, what));
}

TimelineFile TimelineFile::open(const std::string& path, bool create) {
  TimelineFile file(-1, path);
  file.descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0666);
  if (file.descriptor_ < 0) file.refuse(std::strerror(errno));
  struct stat about {};
  if (::fstat(file.descriptor_, &about) != 0) file.refuse(std::strerror(errno));
  if (!S_ISREG(about.st_mode)) file.refuse("it is not a regular file");
  return file;
}

TimelineFile TimelineFile::begin(const std::string& path, std::string_view run, std::string_view first) {
  TimelineFile file = open(path, true);
  if (!file.lock(kLockPatience)) file.refuse(errno == EAGAIN ? "another process holds its lock" : std::strerror(errno));
  if (!file.is_of(run)) {
    const bool done = ::ftruncate(file.descriptor_, 0) == 0 && file.write(formatted("[\n{}{}", first, kEnd), 0);
    const int error = errno;
    if (!done) file.refuse(std::strerror(error));
  }
  file.unlock();
  return file;
}

TimelineFile TimelineFile::join(const std::string& path, std::string_view run) {
  TimelineFile file = open(path, false);
  if (!file.is_of(run)) file.refuse("it is not the file that the first rank of the host has begun");
  return file;
}

std::string TimelineFile::read(std::uint64_t from, std::size_t bytes) const {
  std::string text(bytes, '\0');
  std::size_t got = 0;
  while (got < bytes) {
    const auto more = ::pread(descriptor_, text.data() + got, bytes - got, static_cast<off_t>(from + got));
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) break;
    got += static_cast<std::size_t>(more);
  }
  text.resize(got);
  return text;
}

bool TimelineFile::is_of(std::string_view run) const { return read(0, kHead).find(run) != std::string::npos; }

bool TimelineFile::lock(std::chrono::milliseconds patience) {
  // The lock of this open file, not of the process: it also keeps the ranks of one process apart, goes with whoever dies, and is the one
  // that flock(1) takes for who reads the file.
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    if (std::chrono::steady_clock::now() >= deadline) {
      errno = EAGAIN;
      return false;
    }
    std::this_thread::sleep_for(200us);
  }
  return true;
}

void TimelineFile::unlock() { ::flock(descriptor_, LOCK_UN); }

std::uint64_t TimelineFile::size() const {
  struct stat about {};
  return ::fstat(descriptor_, &about) == 0 ? static_cast<std::uint64_t>(about.st_size) : 0;
}

bool TimelineFile::write(std::string_view text, std::uint64_t at) {
  while (!text.empty()) {
    const auto done = ::pwrite(descriptor_, text.data(), text.size(), static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(done));
    at += static_cast<std::uint64_t>(done);
  }
  return true;
}

/// Finds where the file's end begins. Puts a torn file right first: back to the last line that is whole.
bool TimelineFile::find_end(std::uint64_t& end) {
  const std::uint64_t bytes = size();
  end = bytes - std::min<std::uint64_t>(bytes, kEnd.size());
  if (read(end, kEnd.size()) == kEnd) return true;
  const std::uint64_t from = bytes - std::min<std::uint64_t>(bytes, kTail);
  const std::string tail = read(from, static_cast<std::size_t>(bytes - from));
  for (auto line = tail.rfind('\n'); line != std::string::npos && line > 0; line = tail.rfind('\n', line - 1)) {
    std::string_view whole = std::string_view(tail).substr(0, line);
    if (whole.ends_with(',')) whole.remove_suffix(1);
    if (!whole.ends_with('}')) continue;
    end = from + whole.size();
    return ::ftruncate(descriptor_, static_cast<off_t>(end)) == 0 && write(kEnd, end);
  }
  // Somebody has emptied it, or it is nothing of ours any more: from the start.
  constexpr std::string_view kAnew = R"([
{"name":"the timeline was lost up to here","ph":"i","s":"g","pid":0,"tid":0,"ts":0})";
  end = kAnew.size();
  return ::ftruncate(descriptor_, 0) == 0 && write(std::string(kAnew) + std::string(kEnd), 0);
}

TimelineFile::Outcome TimelineFile::append(std::string_view events, std::uint64_t max_bytes, const std::string& full,
                                           std::chrono::milliseconds patience) {
  if (!lock(patience)) return errno == EAGAIN ? Outcome::Busy : Outcome::Broken;
  const auto finish = [this](Outcome outcome) {
    const int error = errno;
    unlock();
    errno = error;
    return outcome;
  };
  std::uint64_t end = 0;
  if (!find_end(end)) return finish(Outcome::Broken);
  if (end >= kFullMark.size() && read(end - kFullMark.size(), kFullMark.size()) == kFullMark) return finish(Outcome::Full);
  std::string piece;
  while (!events.empty()) {
    piece.clear();
    bool is_full = false;
    while (!events.empty()) {
      const auto next = events.find(",\n", 2);
      const std::string_view event = events.substr(0, next);
      if (end + piece.size() + event.size() + full.size() + kEnd.size() > max_bytes) {
        piece += full;
        is_full = true;
        break;
      }
      if (!piece.empty() && piece.size() + event.size() + kEnd.size() > kPieceBytes) break;
      piece += event;
      events.remove_prefix(event.size());
    }
    const std::size_t bytes = piece.size();
    piece += kEnd;
    if (!write(piece, end)) {
      const int error = errno;
      if (::ftruncate(descriptor_, static_cast<off_t>(end)) == 0) write(kEnd, end);  // there was room for as much
      errno = error;
      return finish(Outcome::Broken);
    }
    end += bytes;
    if (is_full) return finish(Outcome::Full);
  }
  return finish(Outcome::Written);
}

}  // namespace hvd
