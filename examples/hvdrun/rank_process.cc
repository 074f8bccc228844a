#include "examples/hvdrun/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>
#include <vector>

#include "examples/hvdrun/ranks.h"

namespace hvdrun {

namespace {

constexpr std::size_t kLastWords = 10;

[[noreturn]] void fail(const char* call) { throw std::runtime_error(fmt::format("{}: {}", call, std::strerror(errno))); }

/// In the new process: becomes the rank's program. `output`: standard output and error; -1 where they stay.
[[noreturn]] void become(const Plan& plan, const std::string& meeting, int rank, const std::array<int, 2>& output) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // also where hvdrun is killed no rank is left
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  // A group in the background may not read from a terminal.
  if (rank != 0 || ::isatty(STDIN_FILENO) != 0) {
    const int nothing = ::open("/dev/null", O_RDONLY);
    if (nothing >= 0) ::dup2(nothing, STDIN_FILENO);
  }
  if (output[0] >= 0) ::dup2(output[0], STDOUT_FILENO);
  if (output[1] >= 0) ::dup2(output[1], STDERR_FILENO);
  for (const auto& name : plan.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : plan.variables) ::setenv(name.c_str(), value.c_str(), 1);
  for (const auto& [name, value] : variables_of_rank(plan, rank)) ::setenv(name.c_str(), value.c_str(), 1);
  ::setenv("HVD_INIT", meeting.c_str(), 1);
  std::vector<char*> words;
  for (const auto& word : plan.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  const std::string text = fmt::format("hvdrun: {}: {}\n", plan.command.front(), std::strerror(errno));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(127);
}

}  // namespace

RankProcess::RankProcess(const Plan& plan, const std::string& meeting, int rank, const OutputOptions& options) : rank_(rank) {
  constexpr std::array<const char*, 2> kNames{"stdout", "stderr"};
  std::array<int, 2> to{-1, -1};
  const bool is_read = options.prefixes || !options.folder.empty();
  for (std::size_t i = 0; i < streams_.size() && is_read; ++i) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    streams_[i].pipe = ends[0];
    to[i] = ends[1];
    streams_[i].to = i == 0 ? stdout : stderr;
    if (options.prefixes) streams_[i].prefix = fmt::format("[{}]<{}>:", rank, kNames[i]);
    if (options.folder.empty()) continue;
    const std::string folder = fmt::format("{}/rank.{}", options.folder, rank);
    std::filesystem::create_directories(folder);
    streams_[i].copy.reset(std::fopen(fmt::format("{}/{}", folder, kNames[i]).c_str(), "we"));
    if (!streams_[i].copy) fail(folder.c_str());
  }
  process_ = ::fork();
  if (process_ == 0) become(plan, meeting, rank, to);
  for (const int end : to)
    if (end >= 0) ::close(end);
  if (process_ < 0) fail("fork");
  ::setpgid(process_, process_);  // here as well, so that a signal sent at once finds the group
}

RankProcess::~RankProcess() {
  if (!has_ended_ && process_ > 0) {
    send(SIGKILL);
    ::waitpid(process_, &status_, 0);
  }
  for (const auto& stream : streams_)
    if (stream.pipe >= 0) ::close(stream.pipe);
}

void RankProcess::say(Stream& stream, const std::string& line, bool is_whole) {
  const std::string text = stream.prefix + line + (is_whole ? "\n" : stream.prefix.empty() ? "" : "\n");
  std::fwrite(text.data(), 1, text.size(), stream.to);
  std::fflush(stream.to);
  if (stream.copy) {
    std::fwrite(line.data(), 1, line.size(), stream.copy.get());
    if (is_whole) std::fputc('\n', stream.copy.get());
    std::fflush(stream.copy.get());
  }
  if (stream.to != stderr) return;
  last_words_.push_back(line);
  if (last_words_.size() > kLastWords) last_words_.pop_front();
}

void RankProcess::read(Stream& stream) {
  std::array<char, 1 << 16> buffer;
  while (stream.pipe >= 0) {
    const auto length = ::read(stream.pipe, buffer.data(), buffer.size());
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && errno == EAGAIN) return;
    if (length <= 0) {
      ::close(stream.pipe);
      stream.pipe = -1;
      return;
    }
    stream.partial.append(buffer.data(), static_cast<std::size_t>(length));
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = stream.partial.find('\n', begin)) != std::string::npos; begin = end + 1)
      say(stream, stream.partial.substr(begin, end - begin), true);
    stream.partial.erase(0, begin);
  }
}

void RankProcess::pass_output_on() {
  for (auto& stream : streams_) read(stream);
}

void RankProcess::finish_output() {
  pass_output_on();
  for (auto& stream : streams_)
    if (const std::string rest = std::exchange(stream.partial, {}); !rest.empty()) say(stream, rest, false);
}

bool RankProcess::has_ended() {
  if (!has_ended_) has_ended_ = ::waitpid(process_, &status_, WNOHANG) == process_;
  return has_ended_;
}

void RankProcess::send(int signal) const { ::kill(-process_, signal); }

int RankProcess::exit_code() const { return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_); }

std::string RankProcess::describe_end() const {
  if (WIFSIGNALED(status_))
    return fmt::format("rank {} (process {}) was ended by signal {} ({})", rank_, process_, WTERMSIG(status_),
                       ::strsignal(WTERMSIG(status_)));
  return fmt::format("rank {} (process {}) ended with exit code {}", rank_, process_, WEXITSTATUS(status_));
}

}  // namespace hvdrun
