#include "examples/hvdrun/ranks.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <optional>
#include <stdexcept>

#include "examples/hvdrun/rank_process.h"

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kTimeToNotice = 5s;  // in which the other ranks learn by themselves that one has failed
constexpr auto kTimeToEnd = 5s;     // after SIGTERM
constexpr auto kLastOutput = 1s;    // of what a rank has started and left behind

/// A folder of this user's alone, for the file by which the ranks meet.
class MeetingPlace {
 public:
  MeetingPlace() {
    const char* const folder = std::getenv("TMPDIR");
    path_ = fmt::format("{}/hvdrun-XXXXXX", folder != nullptr && *folder != '\0' ? folder : "/tmp");
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error(fmt::format("{}: {}", path_, std::strerror(errno)));
  }
  ~MeetingPlace() {
    ::unlink((path_ + "/ranks").c_str());
    ::rmdir(path_.c_str());
  }
  MeetingPlace(const MeetingPlace&) = delete;
  MeetingPlace& operator=(const MeetingPlace&) = delete;
  /// As HVD_INIT has it.
  [[nodiscard]] std::string address() const { return fmt::format("file://{}/ranks", path_); }

 private:
  std::string path_;
};

/// The signals that hvdrun hears, as a descriptor: not those that its caller wants ignored, as nohup does.
class Signals {
 public:
  Signals() {
    ::sigemptyset(&heard_);
    ::sigaddset(&heard_, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction now {};
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&heard_, signal);
    }
    ::sigprocmask(SIG_BLOCK, &heard_, nullptr);
    descriptor_ = ::signalfd(-1, &heard_, SFD_NONBLOCK | SFD_CLOEXEC);
    if (descriptor_ < 0) throw std::runtime_error(fmt::format("signalfd: {}", std::strerror(errno)));
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

class Ranks {
 public:
  Ranks(const Plan& plan, const OutputOptions& options) {
    for (int rank = 0; rank < plan.ranks; ++rank) {
      all_.emplace_back(plan, place_.address(), rank, options);
      if (options.verbose) std::fprintf(stderr, "hvdrun: rank %d is process %d\n", rank, static_cast<int>(all_.back().process()));
    }
  }

  int run() {
    while (!is_over()) {
      wait();
      while (const int signal = signals_.next()) hear(signal);
      for (auto& rank : all_) rank.pass_output_on();
      note_ends();
      keep_time();
    }
    for (auto& rank : all_) rank.finish_output();
    return conclude();
  }

 private:
  bool is_over() {
    const bool all_ended = std::all_of(all_.begin(), all_.end(), [](auto& rank) { return rank.has_ended(); });
    const bool all_said = std::all_of(all_.begin(), all_.end(), [](const auto& rank) {
      return rank.outputs() == std::array<int, 2>{-1, -1};
    });
    if (all_ended && !last_output_) last_output_ = Clock::now() + kLastOutput;
    return all_ended && (all_said || Clock::now() > *last_output_);
  }

  void wait() {
    std::vector<pollfd> waited{{signals_.descriptor(), POLLIN, 0}};
    for (const auto& rank : all_)
      for (const int output : rank.outputs()) waited.push_back({output, POLLIN, 0});  // -1 is left out
    const bool has_time = end_them_ || last_output_;
    ::poll(waited.data(), waited.size(), has_time ? 100 : 10'000);
  }

  void hear(int signal) {
    const bool is_second = signal_ != 0;
    if (!is_second) signal_ = signal;
    for (auto& rank : all_)
      if (!rank.has_ended()) rank.send(is_second ? SIGKILL : signal);
    end_them_ = Clock::now() + kTimeToEnd;
    has_sent_term_ = true;
  }

  void note_ends() {
    for (auto& rank : all_) {
      if (first_ != nullptr || !rank.has_ended() || rank.exit_code() == 0) continue;
      first_ = &rank;
      if (!end_them_) end_them_ = Clock::now() + kTimeToNotice;
    }
  }

  void keep_time() {
    if (!end_them_ || Clock::now() < *end_them_) return;
    for (auto& rank : all_)
      if (!rank.has_ended()) rank.send(has_sent_term_ ? SIGKILL : SIGTERM);
    has_sent_term_ = true;
    end_them_ = Clock::now() + kTimeToEnd;
  }

  int conclude() {
    // What a rank has started and left behind ends with it.
    for (auto& rank : all_) rank.send(SIGKILL);
    if (signal_ != 0) {
      std::fprintf(stderr, "hvdrun: ended by signal %d (%s)\n", signal_, ::strsignal(signal_));
      return 128 + signal_;
    }
    if (first_ == nullptr) return 0;
    std::fprintf(stderr, "hvdrun: %s, the first to fail%s\n", first_->describe_end().c_str(),
                 first_->last_words().empty() ? "" : "; its last words:");
    for (const auto& line : first_->last_words()) std::fprintf(stderr, "  %s\n", line.c_str());
    return first_->exit_code();
  }

  MeetingPlace place_;
  Signals signals_;
  std::list<RankProcess> all_;
  RankProcess* first_ = nullptr;  // to fail
  int signal_ = 0;                // that hvdrun was sent
  bool has_sent_term_ = false;
  std::optional<Clock::time_point> end_them_, last_output_;
};

}  // namespace

int run_ranks(const Plan& plan, const OutputOptions& options) { return Ranks(plan, options).run(); }

}  // namespace hvdrun
