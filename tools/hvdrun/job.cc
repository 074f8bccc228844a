#include "tools/hvdrun/job.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <list>
#include <optional>
#include <stdexcept>

#include "tools/hvdrun/output.h"
#include "tools/hvdrun/rank.h"

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// in which the other ranks learn by themselves that one has failed
constexpr auto kTimeToNotice = 5s;
// in which a signal that comes again is the same one, which a terminal and a wrapper both have sent
constexpr auto kOneSignal = 1s;
constexpr auto kLastOutput = 1s;  // of what a rank has started and left behind

/// A folder of this user's alone, for the file by which the ranks meet.
class MeetingPlace {
 public:
  MeetingPlace() {
    const char* const folder = std::getenv("TMPDIR");
    const std::filesystem::path parent = folder != nullptr && *folder != '\0' ? folder : "/tmp";
    path_ = std::filesystem::absolute(parent / "hvdrun-XXXXXX").string();  // ranks may go elsewhere
    if (::mkdtemp(path_.data()) == nullptr)
      throw std::runtime_error(fmt::format("{}: {}", path_, std::strerror(errno)));
  }
  ~MeetingPlace() {
    ::unlink((path_ + "/ranks").c_str());
    ::rmdir(path_.c_str());
  }
  MeetingPlace(const MeetingPlace&) = delete;
  MeetingPlace& operator=(const MeetingPlace&) = delete;
  /// Returns it as HVD_INIT has it.
  [[nodiscard]] std::string address() const { return fmt::format("file://{}/ranks", path_); }

 private:
  std::string path_;
};

/// The signals that hvdrun hears, as a descriptor to wait for: SIGINT, SIGTERM, SIGHUP, SIGTSTP and
/// SIGPIPE, but not those that its caller wants ignored, as nohup does; and SIGCHLD, which only
/// wakes. It blocks them in this process, not in the ranks.
class Signals {
 public:
  Signals() {
    ::signal(SIGCHLD, SIG_DFL);  // where the caller ignores it no end of a rank would be told
    ::sigemptyset(&heard_);
    ::sigaddset(&heard_, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGPIPE}) {
      struct sigaction now {};
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN)
        ::sigaddset(&heard_, signal);
    }
    ::sigprocmask(SIG_BLOCK, &heard_, nullptr);
    descriptor_ = ::signalfd(-1, &heard_, SFD_NONBLOCK | SFD_CLOEXEC);
    if (descriptor_ < 0)
      throw std::runtime_error(fmt::format("signalfd: {}", std::strerror(errno)));
  }
  ~Signals() { ::close(descriptor_); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Returns the next one that is none of a child's; 0 if there is none.
  [[nodiscard]] int next() const {
    signalfd_siginfo info{};
    while (::read(descriptor_, &info, sizeof info) == static_cast<ssize_t>(sizeof info))
      if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
    return 0;
  }

 private:
  sigset_t heard_{};
  int descriptor_ = -1;
};

class Job {
 public:
  Job(const Plan& plan, const Options& options) : time_to_end_(options.time_to_end.value_or(5)) {
    const std::array<Outlet*, 2> outlets{&output_,
                                         error_.is_same_file(output_) ? &output_ : &error_};
    for (int rank = 0; rank < plan.ranks; ++rank)
      ranks_.emplace_back(rank, plan, place_.address(), options, outlets);
  }

  int run() {
    while (!is_over()) {
      wait();
      for (Rank& rank : ranks_) rank.pass_output_on();
      for (Outlet* const outlet : {&output_, &error_}) outlet->write_some();
      while (const int signal = signals_.next()) hear(signal);
      note_ends();
      keep_time();
    }
    for (Rank& rank : ranks_) rank.finish_output();
    write_rest();
    return conclude();
  }

 private:
  bool is_over() {
    const bool all_ended =
        std::all_of(ranks_.begin(), ranks_.end(), [](Rank& rank) { return rank.has_ended(); });
    const bool all_said = std::all_of(ranks_.begin(), ranks_.end(),
                                      [](const Rank& rank) { return rank.has_said_all(); });
    // What the ranks have said is not given up because somebody reads it slowly; only who sends a
    // signal will not wait for that.
    const bool is_full = output_.is_full() || error_.is_full();
    if (all_ended && (!last_output_ || (is_full && signal_ == 0)))
      last_output_ = Clock::now() + kLastOutput;
    return all_ended && (all_said || Clock::now() > *last_output_);
  }

  /// Waits for who reads hvdrun's output; not where a signal has come, or comes.
  void write_rest() {
    for (const auto last = Clock::now() + kLastOutput; !output_.is_empty() || !error_.is_empty();) {
      for (Outlet* const outlet : {&output_, &error_}) outlet->write_some();
      if (signal_ == 0) signal_ = signals_.next();
      if (signal_ == SIGTSTP) ::kill(::getpid(), SIGSTOP);
      if (signal_ == SIGTSTP) signal_ = 0;
      if (signal_ != 0 && Clock::now() > last) return;
      std::vector<pollfd> waited{{signals_.descriptor(), POLLIN, 0}};
      add_outlets(waited);
      if (waited.size() > 1) ::poll(waited.data(), waited.size(), 100);
    }
  }

  void add_outlets(std::vector<pollfd>& waited) const {
    for (const Outlet* const outlet : {&output_, &error_})
      if (!outlet->is_empty()) waited.push_back({outlet->descriptor(), POLLOUT, 0});
  }

  void wait() {
    std::vector<pollfd> waited{{signals_.descriptor(), POLLIN, 0}};
    add_outlets(waited);
    for (const Rank& rank : ranks_) rank.add_waited(waited);
    const bool has_time = end_them_ || last_output_;
    ::poll(waited.data(), waited.size(), has_time ? 100 : 10'000);
  }

  void send_all(int signal) {
    for (Rank& rank : ranks_)
      if (!rank.has_ended()) rank.send(signal);
  }

  void hear(int signal) {
    if (signal == SIGTSTP) return stop();
    const bool is_unread = signal == SIGPIPE;  // comes with all that the ranks still say, too
    if (is_unread && signal_ != 0) return;
    const auto now = Clock::now();
    const bool is_again = signal_ != 0 && now >= first_heard_ + kOneSignal;
    if (signal_ == signal && !is_again) return;
    if (signal_ == 0) {
      signal_ = signal;
      first_heard_ = now;
      end_them_ = now + time_to_end_;
    }
    send_all(is_again ? SIGKILL : is_unread ? SIGTERM : signal);
    has_sent_term_ = true;
  }

  /// Stops the ranks and this process, as Ctrl-Z has it, until somebody sends SIGCONT; then all go
  /// on.
  void stop() {
    const auto begin = Clock::now();
    send_all(SIGSTOP);
    ::kill(::getpid(), SIGSTOP);
    send_all(SIGCONT);
    for (auto* const time : {&end_them_, &last_output_})
      if (*time) **time += Clock::now() - begin;
  }

  void note_ends() {
    for (Rank& rank : ranks_) {
      if (first_ != nullptr || !rank.has_ended() || rank.exit_code() == 0) continue;
      first_ = &rank;
      if (!end_them_) end_them_ = Clock::now() + kTimeToNotice;
    }
  }

  void keep_time() {
    if (!end_them_ || Clock::now() < *end_them_) return;
    send_all(has_sent_term_ ? SIGKILL : SIGTERM);
    has_sent_term_ = true;
    end_them_ = Clock::now() + time_to_end_;
  }

  int conclude() {
    // What a rank has started and left behind ends with it.
    for (const Rank& rank : ranks_) rank.send(SIGKILL);
    if (signal_ != 0) {
      const bool is_read = output_.is_empty() && error_.is_empty();
      if (is_read)
        std::fprintf(stderr, "hvdrun: ended by signal %d (%s)\n", signal_, ::strsignal(signal_));
      return 128 + signal_;
    }
    if (first_ == nullptr) return 0;
    std::fprintf(stderr, "hvdrun: %s, the first to fail%s\n", first_->describe_end().c_str(),
                 first_->last_words().empty() ? "" : "; its last words:");
    for (const auto& line : first_->last_words()) std::fprintf(stderr, "  %s\n", line.c_str());
    return first_->exit_code();
  }

  const std::chrono::seconds time_to_end_;  // after SIGTERM
  Signals signals_;
  Outlet output_{STDOUT_FILENO}, error_{STDERR_FILENO};
  MeetingPlace place_;
  std::list<Rank> ranks_;
  const Rank* first_ = nullptr;  // to fail
  int signal_ = 0;               // that hvdrun was sent
  Clock::time_point first_heard_;
  bool has_sent_term_ = false;
  std::optional<Clock::time_point> end_them_, last_output_;
};

}  // namespace

int run_ranks(const Plan& plan, const Options& options) { return Job(plan, options).run(); }

}  // namespace hvdrun
