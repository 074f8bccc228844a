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
constexpr std::size_t kMostWords = 1000;                     // of a line of them
constexpr std::size_t kLongestLine = std::size_t{64} << 10;  // longer ones come in pieces

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

RankProcess::RankProcess(const Plan& plan, const std::string& meeting, int rank, const OutputOptions& options,
                         const std::array<Outlet*, 2>& outlets)
    : rank_(rank) {
  constexpr std::array<const char*, 2> kNames{"stdout", "stderr"};
  std::array<int, 2> to{-1, -1};
  const bool is_read = options.prefixes || !options.folder.empty();
  for (std::size_t i = 0; i < streams_.size() && is_read; ++i) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    streams_[i].pipe = ends[0];
    to[i] = ends[1];
    streams_[i].to = outlets[i];
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
  if (process_ > 0) {
    send(SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  for (const auto& stream : streams_)
    if (stream.pipe >= 0) ::close(stream.pipe);
}

std::array<int, 2> RankProcess::outputs() const {
  std::array<int, 2> waited{-1, -1};
  for (std::size_t i = 0; i < streams_.size(); ++i)
    if (streams_[i].pipe >= 0 && !streams_[i].to->is_full()) waited[i] = streams_[i].pipe;
  return waited;
}

void RankProcess::say(Stream& stream, std::string_view line, bool is_whole) {
  stream.to->add(stream.prefix);
  stream.to->add(line);
  if (is_whole || !stream.prefix.empty()) stream.to->add("\n");
  if (stream.copy) {
    std::fwrite(line.data(), 1, line.size(), stream.copy.get());
    if (is_whole) std::fputc('\n', stream.copy.get());
    std::fflush(stream.copy.get());
  }
  if (&stream != &streams_[1]) return;
  last_words_.emplace_back(line.substr(0, kMostWords));
  if (last_words_.size() > kLastWords) last_words_.pop_front();
}

void RankProcess::read(Stream& stream) {
  if (stream.pipe < 0 || stream.to->is_full()) return;
  std::array<char, 1 << 16> buffer;
  const auto length = ::read(stream.pipe, buffer.data(), buffer.size());
  if (length < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (length <= 0) {
    ::close(stream.pipe);
    stream.pipe = -1;
    return;
  }
  std::string_view arrived(buffer.data(), static_cast<std::size_t>(length));
  for (std::size_t end = 0; (end = arrived.find('\n')) != std::string_view::npos; arrived.remove_prefix(end + 1))
    say(stream, std::exchange(stream.partial, {}).append(arrived.substr(0, end)), true);
  stream.partial += arrived;
  if (stream.partial.size() >= kLongestLine) say(stream, std::exchange(stream.partial, {}), false);
}

void RankProcess::pass_output_on() {
  for (auto& stream : streams_) read(stream);
}

void RankProcess::finish_output() {
  for (auto& stream : streams_)
    if (const std::string rest = std::exchange(stream.partial, {}); !rest.empty()) say(stream, rest, false);
}

bool RankProcess::has_ended() {
  if (has_ended_) return true;
  // It is waited for in the end only: until then nobody else gets its number, and that of its group.
  siginfo_t how{};
  if (::waitid(P_PID, static_cast<id_t>(process_), &how, WEXITED | WNOHANG | WNOWAIT) != 0) {
    has_ended_ = errno == ECHILD;  // somebody has waited for it: how it ended is not to be known
    how_ = {.code = 1, .signal = 0};
  } else if (how.si_pid == process_) {
    has_ended_ = true;
    how_ = how.si_code == CLD_EXITED ? End{.code = how.si_status, .signal = 0} : End{.code = 0, .signal = how.si_status};
  }
  return has_ended_;
}

void RankProcess::send(int signal) const { ::kill(-process_, signal); }

int RankProcess::exit_code() const { return how_.signal != 0 ? 128 + how_.signal : how_.code; }

std::string RankProcess::describe_end() const {
  if (how_.signal != 0)
    return fmt::format("rank {} (process {}) was ended by signal {} ({})", rank_, process_, how_.signal, ::strsignal(how_.signal));
  return fmt::format("rank {} (process {}) ended with exit code {}", rank_, process_, how_.code);
}

}  // namespace hvdrun
