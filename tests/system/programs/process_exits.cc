// For tests/system/scripts/process_exits.sh: ranks that end in their own ways after some
// allreduces.
//   process_exits late_checkpoint FILE SECONDS   the others return from main() at once; rank 0
//                                                writes FILE after so long, then returns too
//   process_exits status CODE                    the last rank calls exit(CODE) while the others
//                                                wait for it
//   process_exits return_then_fail               the last rank returns from main() with 0; rank 0
//                                                then leaves by an exception
//   process_exits signal CODE MILLISECONDS       the last rank calls exit(CODE) in a handler of
//                                                SIGALRM: while it waits for rank 0, which does
//                                                not come, or after so long in the midst of small
//                                                allreduces (0: the former)
//   process_exits leaves CODE                    the last rank calls shutdown() and exit(CODE); the
//                                                others go on, and are told so
//   process_exits refused AGAIN                  init() is refused, as the ranks' knobs differ;
//                                                with AGAIN=1 a second one is not
//   process_exits caught HOW                     the world fails: by a deadline of rank 0 (deadline),
//                                                or as rank 0 calls abort() (abort); the others
//                                                hear of it when rank 0 has returned from main()
//   process_exits followed HOW                   a function follows an allreduce of each rank,
//                                                which returns from main() meanwhile (return), or
//                                                whose last rank calls exit(HOW) in that function
//   process_exits blocked                        a SIGTERM comes whose handler calls exit(0), and
//                                                which main() has blocked
// Prints "rank N: TYPE: TEXT" for an error of the library; exit code 3 after one.
#include <hvd/hvd.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/speak.h"

namespace {

using namespace std::chrono_literals;
using hvd::test::say;

int status_of_signal = 0;

void sum(std::size_t count, const std::string& name) {
  std::vector<float> values(count, static_cast<float>(hvd::rank() + 1));
  const hvd::Buffer buffer{
      values.data(), hvd::DataType::Float32, {static_cast<std::int64_t>(count)}, {}};
  hvd::allreduce(buffer, buffer, {.name = name, .op = hvd::ReduceOp::Sum});
  const auto ranks = static_cast<float>(hvd::size());
  if (values.front() != ranks * (ranks + 1) / 2) throw std::runtime_error("a wrong sum");
}

void go_on_without_last(bool is_last, int status) {
  if (is_last) {
    hvd::shutdown();
    std::exit(status);  // NOLINT: what is tested
  }
  std::this_thread::sleep_for(1s);
  try {
    sum(1000, "without it");
  } catch (const hvd::Shutdown& error) {
    say(hvd::formatted("rank {} goes on: {}", hvd::rank(), error.what()));
  }
}

/// All catch the error, and return from main().
void catch_failure(const std::string& how) {
  if (hvd::rank() != 0) std::this_thread::sleep_for(3s);
  std::vector<float> values(100, 1.0F);
  const hvd::Buffer buffer{values.data(), hvd::DataType::Float32, {100}, {}};
  try {
    if (how == "abort" && hvd::rank() == 0) hvd::abort("had enough");
    hvd::allreduce(buffer, buffer, {.name = "late", .deadline = 500ms});
  } catch (const hvd::Error& error) {
    say(hvd::formatted("rank {} has caught {}", hvd::rank(), hvd::test::type_of(error)));
  }
}

/// A signal after `milliseconds`, once.
void exit_after(int milliseconds) {
  std::signal(SIGALRM, [](int) { std::exit(status_of_signal); });  // NOLINT: what is tested
  itimerval timer{};
  timer.it_value.tv_sec = milliseconds / 1000;
  timer.it_value.tv_usec = milliseconds % 1000 * 1000;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

void by_signal(bool is_last, int milliseconds) {
  if (milliseconds > 0) {
    if (is_last) exit_after(milliseconds);
    for (;;) sum(16, "small");
  }
  if (is_last) exit_after(300);
  if (hvd::rank() == 0) std::this_thread::sleep_for(30s);
  sum(1 << 16, "waited.for");
}

/// What a program does that can do without a world, or knows how to mend what is wrong.
int be_refused(int rank, bool again) {
  hvd::Config config = hvd::Config::from_environment();
  config.fusion_threshold_bytes = 1000 + rank;
  try {
    hvd::init(config);
  } catch (const hvd::Mismatch&) {
    say(hvd::formatted("rank {} was refused", rank));
  }
  if (again) {
    hvd::init();
    sum(1000, "step");
    say(hvd::formatted("rank {} was taken", hvd::rank()));
  }
  return 0;
}

/// A signal that the program's own threads have blocked waits until one of them asks for it.
void keep_blocked_signal() {
  sigset_t blocked;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  std::signal(SIGTERM, [](int) { std::exit(0); });  // NOLINT: what is tested
  ::kill(::getpid(), SIGTERM);
  for (int step = 0; step < 10; ++step) sum(1000, "step");
  int signal = 0;
  if (::sigwait(&blocked, &signal) != 0 || signal != SIGTERM) throw std::runtime_error("no signal");
  say(hvd::formatted("rank {} has its signal", hvd::rank()));
}

/// Functions that run while the process ends. What they use stays: statics that were made after
/// init() end before they are called.
void end_while_followed(bool is_last, const std::string& how) {
  auto* const values = new std::vector<float>(1000, 1.0F);
  const hvd::Buffer buffer{values->data(), hvd::DataType::Float32, {1000}, {}};
  hvd::allreduce_async(buffer, buffer, {.name = "followed", .op = hvd::ReduceOp::Max}).then([=] {
    std::this_thread::sleep_for(300ms);
    say(fmt::format("rank {} has been followed: {}", hvd::rank(), values->back()));
    if (how != "return" && is_last) std::exit(std::stoi(how));  // NOLINT: what is tested
  });
  if (how != "return") std::this_thread::sleep_for(is_last ? 30s : 1s);
}

int run(const std::vector<std::string>& arguments) {
  const std::string& what = arguments.at(0);
  const bool is_last = hvd::rank() == hvd::size() - 1;
  for (int step = 0; step < 4; ++step) sum(1000, "step");
  if (what == "late_checkpoint") {
    if (hvd::rank() != 0) return 0;
    std::this_thread::sleep_for(std::chrono::seconds(std::stoi(arguments.at(2))));
    std::ofstream(arguments.at(1)) << "checkpoint";
  } else if (what == "status") {
    if (is_last) std::exit(std::stoi(arguments.at(1)));  // NOLINT: what is tested
    sum(1000, "one more");
  } else if (what == "return_then_fail") {
    if (is_last) return 0;
    std::this_thread::sleep_for(1s);
    if (hvd::rank() == 0) throw std::runtime_error("rank 0 has had enough");
  } else if (what == "leaves") {
    go_on_without_last(is_last, std::stoi(arguments.at(1)));
  } else if (what == "caught") {
    catch_failure(arguments.at(1));
  } else if (what == "followed") {
    end_while_followed(is_last, arguments.at(1));
  } else if (what == "blocked") {
    keep_blocked_signal();
  } else if (what == "signal") {
    status_of_signal = std::stoi(arguments.at(1));
    by_signal(is_last, std::stoi(arguments.at(2)));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int rank = hvd::launcher_hints().rank.value_or(0);
  try {
    if (argc > 2 && argv[1] == std::string("refused"))
      return be_refused(rank, argv[2] == std::string("1"));
    hvd::init();
    return run({argv + 1, argv + argc});
  } catch (const hvd::Error& error) {
    say(hvd::formatted("rank {}: {}: {}", rank, hvd::test::type_of(error), error.what()));
    // the launcher ends the others soon after the first: let them speak
    std::this_thread::sleep_for(200ms);
    return 3;
  }
}
