#include "tools/hvdrun/ranks.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tools/hvdrun/local_group.h"
#include "tools/hvdrun/outlet.h"
#include "tools/hvdrun/rank.h"
#include "tools/hvdrun/remote_hosts.h"
#include "tools/hvdrun/signals.h"

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kTimeToNotice = 5s;  // in which the other ranks learn by themselves that one has failed
constexpr auto kOneSignal = 1s;     // in which a signal that comes again is the same one, which a terminal and a wrapper both have sent
constexpr auto kLastOutput = 1s;    // of what a rank has started and left behind

class Job {
 public:
  Job(const Plan& plan, const OutputOptions& options) : time_to_end_(options.time_to_end) {
    const std::array<Outlet*, 2> outlets{&output_, error_.is_same_file(output_) ? &output_ : &error_};
    if (plan.hosts.empty()) {
      local_ = std::make_unique<LocalGroup>(plan, options, outlets);
      groups_.push_back(local_.get());
    } else {
      remote_ = std::make_unique<RemoteHosts>(plan, options, outlets, signals_);
      for (auto& group : remote_->groups()) groups_.push_back(&group);
    }
    for (RankGroup* const group : groups_)
      for (Rank* const rank : group->ranks()) all_.push_back(rank);
  }

  int run() {
    while (!is_over()) {
      wait();
      while (const int signal = signals_.next()) hear(signal);
      for (RankGroup* const group : groups_) group->pass_on();
      for (Outlet* const outlet : {&output_, &error_}) outlet->write_some();
      note_ends();
      keep_time();
    }
    for (RankGroup* const group : groups_) group->finish_output();
    write_rest();
    return conclude();
  }

 private:
  bool is_over() {
    const bool all_ended = std::all_of(all_.begin(), all_.end(), [](Rank* rank) { return rank->has_ended(); });
    const bool all_said = std::all_of(groups_.begin(), groups_.end(), [](const RankGroup* group) { return group->has_said_all(); });
    // What the ranks have said is not given up because somebody reads it slowly; only who sends a signal will not wait for that.
    const bool is_full = output_.is_full() || error_.is_full();
    if (all_ended && (!last_output_ || (is_full && signal_ == 0))) last_output_ = Clock::now() + kLastOutput;
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
    for (const RankGroup* const group : groups_) group->add_waited(waited);
    const bool has_time = end_them_ || last_output_;
    ::poll(waited.data(), waited.size(), has_time ? 100 : 10'000);
  }

  void send_all(int signal) {
    for (Rank* const rank : all_)
      if (!rank->has_ended()) rank->send(signal);
  }

  void hear(int signal) {
    if (signal == SIGTSTP) return stop();
    const auto now = Clock::now();
    const bool is_again = signal_ != 0 && now >= first_heard_ + kOneSignal;
    if (signal_ == signal && !is_again) return;
    if (signal_ == 0) {
      signal_ = signal;
      first_heard_ = now;
      end_them_ = now + time_to_end_;
      for (RankGroup* const group : groups_) group->begin_to_end();
    }
    send_all(is_again ? SIGKILL : signal);
    has_sent_term_ = true;
  }

  /// Stops the ranks and this process, as Ctrl-Z has it, until somebody sends SIGCONT; then all go on.
  void stop() {
    const auto begin = Clock::now();
    send_all(SIGSTOP);
    // What goes to other hosts is to leave before; not to one that has stopped to listen.
    for (const auto last = begin + 1s; Clock::now() < last; std::this_thread::sleep_for(1ms)) {
      std::vector<pollfd> waited;
      for (RankGroup* const group : groups_) {
        group->pass_on();
        group->add_waited(waited);
      }
      if (std::none_of(waited.begin(), waited.end(), [](const pollfd& one) { return one.events == POLLOUT; })) break;
    }
    ::kill(::getpid(), SIGSTOP);
    send_all(SIGCONT);
    for (auto* const time : {&end_them_, &last_output_})
      if (*time) **time += Clock::now() - begin;
  }

  void note_ends() {
    for (Rank* const rank : all_) {
      if (first_ != nullptr || !rank->has_ended() || rank->exit_code() == 0) continue;
      first_ = rank;
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
    for (Rank* const rank : all_) rank->send(SIGKILL);
    if (signal_ != 0) {
      const bool is_read = output_.is_empty() && error_.is_empty();
      if (is_read) std::fprintf(stderr, "hvdrun: ended by signal %d (%s)\n", signal_, ::strsignal(signal_));
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
  std::unique_ptr<LocalGroup> local_;
  std::unique_ptr<RemoteHosts> remote_;
  std::vector<RankGroup*> groups_;
  std::vector<Rank*> all_;
  Rank* first_ = nullptr;  // to fail
  int signal_ = 0;         // that hvdrun was sent
  Clock::time_point first_heard_;
  bool has_sent_term_ = false;
  std::optional<Clock::time_point> end_them_, last_output_;
};

}  // namespace

int run_ranks(const Plan& plan, const OutputOptions& options) {
  try {
    return Job(plan, options).run();
  } catch (const Interrupted& interrupted) {
    std::fprintf(stderr, "hvdrun: ended by signal %d (%s)\n", interrupted.signal, ::strsignal(interrupted.signal));
    return 128 + interrupted.signal;
  }
}

}  // namespace hvdrun
