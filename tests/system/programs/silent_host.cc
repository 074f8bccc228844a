// For tests/system/scripts/silent_host.sh: the ranks of the last host fall silent: each is stopped,
// and nothing is closed.
//   silent_host WHAT SECONDS FILE
//     flight     the others wait for an allreduce meanwhile
//     leader     the same, but only the last host's first rank falls silent
//     idle       they have nothing to do with one another for so many seconds, and then make one
//     computes   nobody falls silent: the ranks compute for so many seconds, with more threads than
//                there are cores, and then make one
// The silent ranks stay until FILE exists. Prints "rank N: TYPE after S s: TEXT" for an error of
// the library, where S counts from the silence on, and "rank N has ended" after shutdown(); exit
// code 3 after an error.
#include <fmt/format.h>
#include <hvd/hvd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/speak.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using hvd::test::say;

/// A process that stops this one when it is told to, and ends it when `file` exists. To be made
/// before init(), as only then fork() may be used.
class Stopper {
 public:
  explicit Stopper(const std::string& file) {
    if (::pipe(line_) != 0) throw std::runtime_error("no pipe");
    const pid_t parent = ::getpid();
    if (::fork() != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    char word = 0;
    if (::close(line_[1]) != 0 || ::read(line_[0], &word, 1) != 1) ::_exit(0);
    ::kill(parent, SIGSTOP);
    for (int looks = 0; looks < 1200 && !std::filesystem::exists(file); ++looks)
      std::this_thread::sleep_for(100ms);
    ::kill(parent, SIGKILL);
    ::_exit(0);
  }
  void stop() const {
    while (::write(line_[1], "s", 1) != 1) continue;
    std::this_thread::sleep_for(1h);
  }

 private:
  int line_[2] = {-1, -1};
};

void compute_until(Clock::time_point end) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()) + 1; ++i)
    threads.emplace_back([=] {
      volatile double value = 1;
      while (Clock::now() < end) value = value * 1.0000001;
    });
  for (auto& thread : threads) thread.join();
}

void sum(const std::string& name) {
  std::vector<float> values(1000, 1.0F);
  const hvd::Buffer buffer{values.data(), hvd::DataType::Float32, {1000}, {}};
  hvd::allreduce(buffer, buffer, {.name = name, .op = hvd::ReduceOp::Sum});
  if (values.front() != static_cast<float>(hvd::size())) throw std::runtime_error("a wrong sum");
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::string what = argv[1];
  const auto time = std::chrono::seconds(std::stoi(argv[2]));
  const Stopper stopper(argv[3]);
  hvd::init();
  const int rank = hvd::rank();
  for (int step = 0; step < 5; ++step) sum("step");
  const bool is_silent = what != "computes" && hvd::cross_rank() == hvd::cross_size() - 1 &&
                         (what != "leader" || hvd::local_rank() == 0);
  hvd::barrier();
  const auto begin = Clock::now();
  int status = 0;
  if (is_silent) stopper.stop();
  try {
    if (what == "idle") std::this_thread::sleep_for(time);
    if (what == "computes") compute_until(begin + time);
    sum("step");
  } catch (const hvd::Error& error) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin);
    say(fmt::format("rank {}: {} after {} s: {}", rank, hvd::test::type_of(error), seconds.count(),
                    error.what()));
    status = 3;
  }
  hvd::shutdown();
  say(fmt::format("rank {} has ended", rank));
  return status;
}
