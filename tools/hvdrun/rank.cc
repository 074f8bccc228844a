#include "tools/hvdrun/rank.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace hvdrun {

namespace {

[[noreturn]] void fail(const char* call) {
  throw std::runtime_error(fmt::format("{}: {}", call, std::strerror(errno)));
}

using Variables = std::vector<std::pair<std::string, std::string>>;

/// In the new process: becomes the rank's program. `output`: standard output and error; -1 where
/// they stay.
[[noreturn]] void become(const Plan& plan, const Variables& own, bool reads_input,
                         const std::array<int, 2>& output, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);       // also where hvdrun is killed no rank is left
  if (::getppid() != parent) ::_exit(127);  // it was, before this
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (const int nothing = reads_input ? -1 : ::open("/dev/null", O_RDONLY); nothing > STDIN_FILENO)
    ::dup2(nothing, STDIN_FILENO);
  if (output[0] >= 0) ::dup2(output[0], STDOUT_FILENO);
  if (output[1] >= 0) ::dup2(output[1], STDERR_FILENO);
  for (const auto& name : plan.unset) ::unsetenv(name.c_str());
  for (const auto* const variables : {&plan.variables, &own})
    for (const auto& [name, value] : *variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> words;
  for (const auto& word : plan.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  const std::string text =
      fmt::format("hvdrun: {}: {}\n", plan.command.front(), std::strerror(errno));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(127);
}

}  // namespace

std::string Rank::describe_end() const {
  const std::string end =
      signal_ != 0 ? fmt::format("was ended by signal {} ({})", signal_, ::strsignal(signal_))
                   : fmt::format("ended with exit code {}", code_);
  return fmt::format("rank {} (process {}) {}", number_, process_, end);
}

Rank::Rank(int number, const Plan& plan, const std::string& meeting_place, const Options& options,
           const std::array<Outlet*, 2>& outlets)
    : number_(number), lines_(number, options, outlets) {
  Variables own = variables_of_rank(number, plan.ranks);
  own.emplace_back("HVD_INIT", meeting_place);
  // a group in the background may not read from a terminal
  const bool reads_input = number == 0 && ::isatty(STDIN_FILENO) == 0;
  const bool is_piped = options.prefixes || !options.output_folder.empty();
  std::array<int, 2> to{-1, -1};
  for (std::size_t i = 0; i < pipes_.size() && is_piped; ++i) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    pipes_[i] = ends[0];
    to[i] = ends[1];
  }
  const pid_t parent = ::getpid();
  process_ = ::fork();
  if (process_ == 0) become(plan, own, reads_input, to, parent);
  for (const int end : to)
    if (end >= 0) ::close(end);
  if (process_ < 0) fail("fork");
  ::setpgid(process_, process_);  // here as well, so that a signal sent at once finds the group
  if (options.verbose) fmt::print(stderr, "hvdrun: rank {} is process {}\n", number, process_);
}

Rank::~Rank() {
  if (process_ > 0) {
    send(SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  for (const int pipe : pipes_)
    if (pipe >= 0) ::close(pipe);
}

void Rank::add_waited(std::vector<pollfd>& waited) const {
  for (std::size_t i = 0; i < pipes_.size(); ++i)
    if (pipes_[i] >= 0 && !lines_.is_full(i)) waited.push_back({pipes_[i], POLLIN, 0});
}

void Rank::read(std::size_t stream) {
  int& pipe = pipes_[stream];
  if (pipe < 0 || lines_.is_full(stream)) return;
  std::array<char, 1 << 16> buffer;
  const auto length = ::read(pipe, buffer.data(), buffer.size());
  if (length < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (length <= 0) {
    ::close(pipe);
    pipe = -1;
    return;
  }
  lines_.hear(stream, std::string_view(buffer.data(), static_cast<std::size_t>(length)));
}

void Rank::pass_output_on() {
  for (std::size_t stream = 0; stream < pipes_.size(); ++stream) read(stream);
}

bool Rank::has_ended() {
  if (has_ended_) return true;
  // It is waited for in the end only: until then nobody else gets its number, and that of its
  // group.
  siginfo_t how{};
  if (::waitid(P_PID, static_cast<id_t>(process_), &how, WEXITED | WNOHANG | WNOWAIT) != 0) {
    has_ended_ = errno == ECHILD;  // somebody has waited for it: how it ended is not to be known
    code_ = 1;
  } else if (how.si_pid == process_) {
    has_ended_ = true;
    (how.si_code == CLD_EXITED ? code_ : signal_) = how.si_status;
  }
  return has_ended_;
}

void Rank::send(int signal) const { ::kill(-process_, signal); }

}  // namespace hvdrun
