#include "tools/hvdrun/remote_group.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <utility>

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostInput = std::size_t{256} << 10;  // on its way to rank 0
constexpr std::size_t kLastWords = 5;
constexpr auto kTimeToDie = 5s;  // after SIGKILL, until the connection is believed to lead nowhere

[[noreturn]] void fail(const char* call) { throw std::runtime_error(fmt::format("{}: {}", call, std::strerror(errno))); }

std::string own_path() { return std::filesystem::read_symlink("/proc/self/exe"); }

/// What starts the helper: this program, as it is called here, or as PATH finds it there. The login shell may be any; sh does the rest.
std::vector<std::string> words_of_helper(const Plan& plan, const HostRanks& host) {
  const std::string self = own_path();
  if (host.is_this_host) return {self, "--host-helper"};
  std::vector<std::string> words = plan.ssh;
  words.push_back(host.name);
  const std::string script = R"(p=$0; [ -x "$p" ] || p=hvdrun; exec "$p" --host-helper)";
  words.push_back("exec " + quoted({"/bin/sh", "-c", script, self}));
  return words;
}

[[noreturn]] void become(const std::vector<std::string>& command, int input, int output, int errors, pid_t parent) {
  ::setpgid(0, 0);  // SIGINT of a terminal is not for it
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(127);  // it has ended before
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::dup2(input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(errors, STDERR_FILENO);
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  const std::string text = fmt::format("{}: {}\n", command.front(), std::strerror(errno));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(127);
}

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return ends;
}

std::array<int, 2> make_sockets() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) fail("socketpair");
  return ends;
}

void close(int& descriptor) {
  if (descriptor >= 0) ::close(std::exchange(descriptor, -1));
}

}  // namespace

class RemoteGroup::RemoteRank final : public Rank {
 public:
  RemoteRank(RemoteGroup& group, int number, const OutputOptions& options, const std::array<Outlet*, 2>& outlets)
      : group_(group), number_(number), lines_(number, options, outlets) {}
  bool has_ended() override { return end_.has_value() || group_.is_lost_; }
  void send(int signal) override {
    if (has_ended() && signal != SIGKILL) return;
    group_.send(Kind::Signal, Packer().put(static_cast<std::uint32_t>(number_)).put(static_cast<std::uint32_t>(signal)));
    if (signal == SIGKILL && !group_.give_up_) group_.give_up_ = Clock::now() + kTimeToDie;
  }
  [[nodiscard]] int exit_code() const override { return end_ ? end_->exit_code() : 255; }
  [[nodiscard]] std::string describe_end() const override {
    if (end_) return fmt::format("rank {} (process {} on {}) {}", number_, process, group_.host_.name, end_->text());
    return fmt::format("rank {} is lost with its host, {}", number_, group_.lost_);
  }
  [[nodiscard]] const std::deque<std::string>& last_words() const override { return lines_.last_words(); }
  RankLines& lines() { return lines_; }
  void end(const End& how) { end_ = how; }

  std::uint32_t process = 0;
  bool has_said_all = false;

 private:
  RemoteGroup& group_;
  const int number_;
  RankLines lines_;
  std::optional<End> end_;
};

namespace {

/// The process, and hvdrun's ends: `to` is its standard input, `from` and `errors` are what it says.
struct Started {
  pid_t process;
  int to, from, errors;
};

Started start_process(const std::vector<std::string>& command) {
  auto input = make_sockets();
  auto output = make_pipe();
  auto errors = make_pipe();
  const pid_t parent = ::getpid();
  const pid_t process = ::fork();
  if (process == 0) become(command, input[0], output[1], errors[1], parent);
  close(input[0]);
  close(output[1]);
  close(errors[1]);
  if (process < 0) fail("fork");
  ::setpgid(process, process);
  return {process, input[1], output[0], errors[0]};
}

}  // namespace

RemoteGroup::RemoteGroup(const Plan& plan, const HostRanks& host, const OutputOptions& options, const std::array<Outlet*, 2>& outlets)
    : host_(host), time_to_end_(options.time_to_end), remarks_(outlets[1]) {
  for (int local = 0; local < host.count; ++local) ranks_.emplace_back(*this, host.first + local, options, outlets);
  const Started started = start_process(words_of_helper(plan, host));
  process_ = started.process;
  from_ = started.from;
  errors_ = started.errors;
  to_helper_ = started.to;
  to_.emplace(to_helper_);
}

RemoteGroup::~RemoteGroup() {
  hang_up();
  const auto last = Clock::now() + (has_started_ && !is_lost_ ? time_to_end_ + 2s : 2s);
  std::array<char, 1 << 12> buffer;
  while (Clock::now() < last && ::waitpid(process_, nullptr, WNOHANG) == 0) {
    while (::read(from_, buffer.data(), buffer.size()) > 0) {
    }
    pollfd one{from_, POLLIN, 0};
    ::poll(&one, 1, 5);
    if ((one.revents & POLLHUP) != 0) std::this_thread::sleep_for(1ms);
  }
  ::kill(-process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
  close(from_);
  close(errors_);
}

void RemoteGroup::hang_up() {
  if (to_) to_->write_some();
  close_to();
}

void RemoteGroup::close_to() {
  to_.reset();
  close(to_helper_);
}

void RemoteGroup::send(const std::string& message) {
  if (to_) to_->add(message);
}

void RemoteGroup::reserve(const MeetingCandidates& candidates) {
  send(Kind::Reserve, Packer()
                          .put(candidates.addresses)
                          .put(std::string_view(candidates.interfaces))
                          .put(std::uint32_t{candidates.is_said})
                          .put(std::uint32_t{candidates.allows_loopback}));
}

void RemoteGroup::start(const HostJob& job) {
  send(framed(Kind::Start, pack(job)));
  // A group in the background may not read from a terminal.
  if (host_.first == 0) input_ = ::isatty(STDIN_FILENO) != 0 ? -1 : STDIN_FILENO;
  if (host_.first == 0 && input_ < 0) send(Kind::Input, Packer());
}

std::vector<Rank*> RemoteGroup::ranks() {
  std::vector<Rank*> all;
  for (auto& rank : ranks_) all.push_back(&rank);
  return all;
}

RemoteGroup::RemoteRank& RemoteGroup::rank_of(std::uint32_t number) {
  for (auto& rank : ranks_)
    if (number-- == static_cast<std::uint32_t>(host_.first)) return rank;
  throw std::runtime_error(fmt::format("{}: its helper speaks of a rank that it does not have", host_.name));
}

void RemoteGroup::add_waited(std::vector<pollfd>& waited) const {
  const bool is_full =
      !is_ending_ && !ranks_.empty() &&
      (const_cast<RemoteRank&>(ranks_.front()).lines().is_full(0) || const_cast<RemoteRank&>(ranks_.front()).lines().is_full(1));
  if (from_ >= 0 && !is_full) waited.push_back({from_, POLLIN, 0});
  if (errors_ >= 0) waited.push_back({errors_, POLLIN, 0});
  if (to_ && !to_->is_empty()) waited.push_back({to_helper_, POLLOUT, 0});
  if (input_ >= 0 && untaken_ < kMostInput) waited.push_back({input_, POLLIN, 0});
}

void RemoteGroup::take_input() {
  pollfd one{input_, POLLIN, 0};
  if (input_ < 0 || untaken_ >= kMostInput || ::poll(&one, 1, 0) <= 0) return;
  std::array<char, 1 << 16> buffer;
  const auto length = ::read(input_, buffer.data(), buffer.size());
  if (length < 0 && (errno == EINTR || errno == EAGAIN)) return;
  const std::string_view bytes(buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  send(framed(Kind::Input, bytes));
  untaken_ += bytes.size();
  if (bytes.empty()) input_ = -1;
}

void RemoteGroup::pass_on() {
  listen_to_errors();
  listen();
  if (has_started_) take_input();
  if (to_) to_->write_some();
  if (give_up_ && Clock::now() > *give_up_ && std::any_of(ranks_.begin(), ranks_.end(), [](RemoteRank& rank) { return !rank.has_ended(); }))
    lose();
}

void RemoteGroup::listen() {
  std::array<char, 1 << 16> buffer;
  if (from_ < 0 || (!is_ending_ && (ranks_.front().lines().is_full(0) || ranks_.front().lines().is_full(1)))) return;
  const auto length = ::read(from_, buffer.data(), buffer.size());
  if (length < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (length <= 0) return lose();
  in_.add({buffer.data(), static_cast<std::size_t>(length)});
  if (!has_begun_) has_begun_ = in_.skip_to(kHelperBegins);
  if (!has_begun_) return;
  while (const auto message = in_.next()) follow(*message);
}

void RemoteGroup::follow(const Message& message) {
  Unpacker in(message.payload);
  if (message.kind == Kind::Hello) {
    const std::string version = in.text();
    if (version != HVD_VERSION)
      throw std::runtime_error(fmt::format("{} has hvd {}, and this host {}: all hosts need the same", host_.name, version, HVD_VERSION));
    static_cast<void>(in.number());
    connection_ = in.text();
    has_greeted_ = true;
  } else if (message.kind == Kind::Reserved) {
    reserved_ = in.text();
  } else if (message.kind == Kind::Started) {
    for (auto& rank : ranks_) rank.process = in.number();
    has_started_ = true;
  } else if (message.kind == Kind::Output) {
    RemoteRank& rank = rank_of(in.number());
    const std::size_t stream = in.number() == 0 ? 0 : 1;
    if (!is_ending_ || !rank.lines().is_full(stream)) rank.lines().hear(stream, in.text());
  } else if (message.kind == Kind::Ended) {
    RemoteRank& rank = rank_of(in.number());
    const int code = in.integer();
    rank.end({.code = code, .signal = in.integer()});
  } else if (message.kind == Kind::Said) {
    rank_of(in.number()).has_said_all = true;
  } else if (message.kind == Kind::Taken) {
    untaken_ -= std::min<std::size_t>(untaken_, in.number());
  } else if (message.kind == Kind::Failed) {
    throw std::runtime_error(fmt::format("{}: {}", host_.name, in.text()));
  }
}

void RemoteGroup::listen_to_errors() {
  std::array<char, 1 << 12> buffer;
  const auto length = errors_ < 0 ? -1 : ::read(errors_, buffer.data(), buffer.size());
  if (length == 0) close(errors_);
  if (length <= 0) return;
  remark_.append(buffer.data(), static_cast<std::size_t>(length));
  for (std::size_t end = 0; (end = remark_.find('\n')) != std::string::npos; remark_.erase(0, end + 1)) {
    std::string line = remark_.substr(0, end);
    if (line.ends_with('\r')) line.pop_back();
    if (has_started_) remarks_->add(fmt::format("hvdrun: {}: {}\n", host_.name, line));
    last_words_.push_back(std::move(line));
    if (last_words_.size() > kLastWords) last_words_.pop_front();
  }
}

/// Nothing more comes from there.
void RemoteGroup::lose() {
  if (is_lost_) return;
  close(from_);
  close_to();
  input_ = -1;
  lost_ = describe_loss();
  is_lost_ = true;
  if (!has_started_) throw std::runtime_error(lost_);
}

std::string RemoteGroup::describe_loss() {
  siginfo_t how{};
  for (const auto last = Clock::now() + 2s; Clock::now() < last; std::this_thread::sleep_for(5ms)) {
    listen_to_errors();
    if (::waitid(P_PID, static_cast<id_t>(process_), &how, WEXITED | WNOHANG | WNOWAIT) != 0 || how.si_pid == process_) break;
  }
  while (errors_ >= 0) {
    const auto said = last_words_.size() + remark_.size();
    listen_to_errors();
    if (last_words_.size() + remark_.size() == said) break;
  }
  std::string words = remark_;
  for (auto line = last_words_.rbegin(); line != last_words_.rend(); ++line)
    words = words.empty() ? *line : fmt::format("{} | {}", *line, words);
  const int code = how.si_pid == process_ && how.si_code == CLD_EXITED ? how.si_status : -1;
  const std::string told = words.empty() ? "" : fmt::format(": {}", words);
  if (has_greeted_ || host_.is_this_host) return fmt::format("{}: the connection to it has ended{}", host_.name, told);
  if (code == 255)
    return fmt::format("{}: ssh does not get there{}; 'ssh {} true' must work without a question", host_.name, told, host_.name);
  if (code == 126 || code == 127)
    return fmt::format("{}: hvdrun cannot be run there{}; it must be at the same place as here ({}), or in PATH", host_.name, told,
                       own_path());
  return fmt::format("{}: its login shell, or ssh, ended ({}) before hvdrun ran there{}", host_.name,
                     code < 0 ? "by a signal" : fmt::format("exit code {}", code), told);
}

bool RemoteGroup::has_said_all() const {
  return is_lost_ || std::all_of(ranks_.begin(), ranks_.end(), [](const RemoteRank& rank) { return rank.has_said_all; });
}

void RemoteGroup::finish_output() {
  for (auto& rank : ranks_) rank.lines().finish();
}

}  // namespace hvdrun
