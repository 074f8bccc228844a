#include "tools/hvdrun/output.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "tools/hvdrun/options.h"

namespace hvdrun {

namespace {

/// A pipe that can be written takes so much without a wait (PIPE_BUF).
constexpr std::size_t kPiece = 4096;
constexpr std::size_t kLastWords = 10;
constexpr std::size_t kMostWords = 1000;                     // of a line of them
constexpr std::size_t kLongestLine = std::size_t{64} << 10;  // longer ones come in pieces

bool is_socket(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
}

}  // namespace

Outlet::Outlet(int descriptor) : descriptor_(descriptor), is_socket_(is_socket(descriptor)) {}

void Outlet::write_some() {
  while (!is_empty()) {
    pollfd one{descriptor_, POLLOUT, 0};
    if (::poll(&one, 1, 0) <= 0) break;
    const char* const next = waiting_.data() + begin_;
    const std::size_t length = std::min(kPiece, waiting_.size() - begin_);
    const auto written = is_socket_ ? ::send(descriptor_, next, length, MSG_NOSIGNAL | MSG_DONTWAIT)
                                    : ::write(descriptor_, next, length);
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) break;
    // What nobody can take any more is lost, as it would be for the rank itself.
    begin_ = written < 0 ? waiting_.size() : begin_ + static_cast<std::size_t>(written);
  }
  if (!is_empty() && begin_ < kMost) return;
  waiting_.erase(0, begin_);
  begin_ = 0;
}

bool Outlet::is_same_file(const Outlet& other) const {
  struct stat own {};
  struct stat others {};
  return ::fstat(descriptor_, &own) == 0 && ::fstat(other.descriptor_, &others) == 0 &&
         own.st_dev == others.st_dev && own.st_ino == others.st_ino;
}

RankLines::RankLines(int rank, const Options& options, const std::array<Outlet*, 2>& outlets) {
  constexpr std::array<const char*, 2> kNames{"stdout", "stderr"};
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    streams_[i].to = outlets[i];
    if (options.prefixes) streams_[i].prefix = fmt::format("[{}]<{}>:", rank, kNames[i]);
    if (options.output_folder.empty()) continue;
    const std::string folder = fmt::format("{}/rank.{}", options.output_folder, rank);
    std::filesystem::create_directories(folder);
    streams_[i].copy.reset(std::fopen(fmt::format("{}/{}", folder, kNames[i]).c_str(), "we"));
    if (!streams_[i].copy)
      throw std::runtime_error(fmt::format("{}: {}", folder, std::strerror(errno)));
  }
}

void RankLines::say(Stream& stream, std::string_view line, bool is_whole) {
  stream.to->add(stream.prefix);
  stream.to->add(line);
  if (is_whole || !stream.prefix.empty()) stream.to->add("\n");
  if (stream.copy) {
    std::fwrite(line.data(), 1, line.size(), stream.copy.get());
    if (is_whole) std::fputc('\n', stream.copy.get());
    std::fflush(stream.copy.get());
  }
  if (&stream == &streams_[1]) remember(line);
}

void RankLines::remember(std::string_view line) {
  const auto is_what = [](std::string_view words) { return words.starts_with("  what():"); };
  if (line.starts_with("frame #")) return;  // of a c10::Error's stack
  if (is_what(line)) last_words_.clear();
  last_words_.emplace_back(line.substr(0, kMostWords));
  // The exception's text is worth more than what the other threads say while the process ends.
  if (last_words_.size() > kLastWords)
    last_words_.erase(last_words_.begin() + (is_what(last_words_.front()) ? 1 : 0));
}

void RankLines::hear(std::size_t stream, std::string_view bytes) {
  Stream& one = streams_[stream];
  for (std::size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;
       bytes.remove_prefix(end + 1))
    say(one, std::exchange(one.partial, {}).append(bytes.substr(0, end)), true);
  one.partial += bytes;
  if (one.partial.size() >= kLongestLine) say(one, std::exchange(one.partial, {}), false);
}

void RankLines::finish() {
  for (auto& stream : streams_)
    if (const std::string rest = std::exchange(stream.partial, {}); !rest.empty())
      say(stream, rest, false);
}

}  // namespace hvdrun
