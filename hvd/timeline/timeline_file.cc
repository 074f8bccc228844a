#include "hvd/timeline/timeline_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr std::string_view kEnd = "\n]\n";
constexpr auto kPatience = 5s;  // with another process that has the lock

}  // namespace

TimelineFile::TimelineFile(const std::string& path, std::string_view first)
    : descriptor_(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_CREAT, 0666)) {
  struct stat about {};
  const char* problem = nullptr;
  if (descriptor_ < 0 || ::fstat(descriptor_, &about) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(about.st_mode)) {
    problem = "it is not a regular file";
  } else if (!lock()) {
    problem = errno == EWOULDBLOCK ? "another process holds its lock" : std::strerror(errno);
  } else {
    const std::string begin = "[" + std::string(first.substr(1));
    if (read(0, begin.size()) != begin &&
        !(::ftruncate(descriptor_, 0) == 0 && write(begin + std::string(kEnd), 0)))
      problem = std::strerror(errno);
    unlock();
  }
  if (problem == nullptr) return;
  if (descriptor_ >= 0) ::close(descriptor_);
  throw InvalidArgument(formatted("the timeline '{}' cannot be written: {}", path, problem));
}

TimelineFile::~TimelineFile() { ::close(descriptor_); }

bool TimelineFile::lock() {
  // The lock of this open file, not of the process: it also keeps the ranks of one process apart,
  // goes with whoever dies, and is the one that flock(1) takes for who reads the file.
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if ((errno != EWOULDBLOCK && errno != EINTR) || std::chrono::steady_clock::now() >= deadline)
      return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

void TimelineFile::unlock() {
  const int error = errno;
  ::flock(descriptor_, LOCK_UN);
  errno = error;
}

std::optional<std::string> TimelineFile::read(std::uint64_t from, std::size_t bytes) const {
  std::string text(bytes, '\0');
  std::size_t have = 0;
  while (have < bytes) {
    const auto got =
        ::pread(descriptor_, text.data() + have, bytes - have, static_cast<off_t>(from + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  text.resize(have);
  return text;
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

TimelineFile::Outcome TimelineFile::append(std::string_view events, std::uint64_t max_bytes,
                                           std::string_view full) {
  if (!lock()) return errno == EWOULDBLOCK ? Outcome::Busy : Outcome::Broken;
  const Outcome outcome = append_locked(events, max_bytes, full);
  unlock();
  return outcome;
}

TimelineFile::Outcome TimelineFile::append_locked(std::string_view events, std::uint64_t max_bytes,
                                                  std::string_view full) {
  struct stat about {};
  if (::fstat(descriptor_, &about) != 0) return Outcome::Broken;
  const auto size = static_cast<std::uint64_t>(about.st_size);
  std::uint64_t end = size - std::min<std::uint64_t>(size, 2 * kMostEventBytes);
  auto read_tail = read(end, 2 * kMostEventBytes);
  if (!read_tail) return Outcome::Broken;
  std::string tail = std::move(*read_tail);
  if (tail.ends_with(kEnd)) {
    tail.resize(tail.size() - kEnd.size());
  } else {  // torn: up to the last line that is whole, or to the beginning, if somebody has emptied
            // it
    const auto whole = [&tail](std::string_view last) { return tail.rfind(last) + 1; };
    tail.resize(std::max(whole("}\n"), whole("},\n")));
    if (tail.empty()) end = 0;
    if (::ftruncate(descriptor_, static_cast<off_t>(end + tail.size())) != 0)
      return Outcome::Broken;
    // nothing more is appended to that
    if (tail.ends_with(kFullMark) && !write(kEnd, end + tail.size())) return Outcome::Broken;
  }
  if (tail.ends_with(kFullMark)) return Outcome::Full;
  end += tail.size();
  std::string text(events);
  const bool is_full = end + events.size() + full.size() + kEnd.size() > max_bytes;
  if (is_full) {
    const std::uint64_t room = max_bytes - std::min(max_bytes, end + full.size() + kEnd.size());
    text.resize(text.rfind(",\n{", static_cast<std::size_t>(room)));  // it begins so
    text += full;
  }
  if (end == 0) text.front() = '[';
  text += kEnd;
  if (write(text, end)) return is_full ? Outcome::Full : Outcome::Written;
  const int error = errno;
  // there was room for as much
  if (::ftruncate(descriptor_, static_cast<off_t>(end)) == 0) write(kEnd, end);
  errno = error;
  return Outcome::Broken;
}

}  // namespace hvd
