#include "tools/hvdrun/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace hvdrun {

namespace {

[[noreturn]] void fail(const char* call) { throw std::runtime_error(fmt::format("{}: {}", call, std::strerror(errno))); }

/// In the new process: becomes the rank's program. `output`: standard output and error; -1 where they stay.
[[noreturn]] void become(const Program& program, const RankProcess::Own& own, const std::array<int, 2>& output, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);       // also where hvdrun is killed no rank is left
  if (::getppid() != parent) ::_exit(127);  // it was, before this
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int nothing = own.input < 0 ? ::open("/dev/null", O_RDONLY) : -1;
  if (const int input = own.input < 0 ? nothing : own.input; input > STDIN_FILENO) ::dup2(input, STDIN_FILENO);
  if (output[0] >= 0) ::dup2(output[0], STDOUT_FILENO);
  if (output[1] >= 0) ::dup2(output[1], STDERR_FILENO);
  for (const auto& name : program.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : program.variables) ::setenv(name.c_str(), value.c_str(), 1);
  for (const auto& [name, value] : own.variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> words;
  for (const auto& word : program.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  const std::string text = fmt::format("hvdrun: {}: {}\n", program.command.front(), std::strerror(errno));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(127);
}

}  // namespace

std::string End::text() const {
  return signal != 0 ? fmt::format("was ended by signal {} ({})", signal, ::strsignal(signal))
                     : fmt::format("ended with exit code {}", code);
}

RankProcess::RankProcess(const Program& program, const Own& own, RankSink* sink) : sink_(sink) {
  std::array<int, 2> to{-1, -1};
  for (std::size_t i = 0; i < pipes_.size() && sink_ != nullptr; ++i) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    pipes_[i] = ends[0];
    to[i] = ends[1];
  }
  const pid_t parent = ::getpid();
  process_ = ::fork();
  if (process_ == 0) become(program, own, to, parent);
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
  for (const int pipe : pipes_)
    if (pipe >= 0) ::close(pipe);
}

void RankProcess::add_waited(std::vector<pollfd>& waited) const {
  for (std::size_t i = 0; i < pipes_.size(); ++i)
    if (pipes_[i] >= 0 && !sink_->is_full(i)) waited.push_back({pipes_[i], POLLIN, 0});
}

void RankProcess::read(std::size_t stream) {
  int& pipe = pipes_[stream];
  if (pipe < 0 || sink_->is_full(stream)) return;
  std::array<char, 1 << 16> buffer;
  const auto length = ::read(pipe, buffer.data(), buffer.size());
  if (length < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (length <= 0) {
    ::close(pipe);
    pipe = -1;
    return;
  }
  sink_->hear(stream, std::string_view(buffer.data(), static_cast<std::size_t>(length)));
}

void RankProcess::pass_output_on() {
  for (std::size_t stream = 0; stream < pipes_.size(); ++stream) read(stream);
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

}  // namespace hvdrun
