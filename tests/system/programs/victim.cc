// For tests/system/scripts: a program of several ranks of which one (rank 2, or the last) comes to
// grief in the middle of its allreduces.
//   victim WHAT [MILLISECONDS]
//     fine                       nothing happens
//     kill segv                  the rank is killed, or reads where it may not, from another
//                                thread, after so long
//     throw _exit exit0          it leaves main by an exception, by _exit(7), by exit(0), before
//                                one of its allreduces
//     late                       it comes so late to one allreduce
//     fewer more                 it has other numbers of steps than the others, who all return from
//                                main() after theirs; the last rank is so slow in the steps that it
//                                has alone
// Every rank prints "pid N" first, and "rank N: TYPE: TEXT" for an error of the library. Exit code
// 3 after such an error.
#include <hvd/hvd.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/speak.h"

namespace {

using namespace std::chrono_literals;
using hvd::test::say;
using hvd::test::type_of;

hvd::Buffer buffer(float* data, std::size_t count) {
  return {data, hvd::DataType::Float32, {static_cast<std::int64_t>(count)}, {}};
}

/// What a training loop does: small and large tensors, waited for and as bursts, in both kinds of
/// memory.
class Loop {
 public:
  void step() {
    const hvd::AllreduceOptions small_options{.name = "small", .op = hvd::ReduceOp::Sum};
    for (int i = 0; i < 20; ++i)
      hvd::allreduce(buffer(small_.data(), small_.size()), buffer(small_.data(), small_.size()),
                     small_options);
    std::vector<hvd::Handle<void>> handles;
    for (std::size_t i = 0; i < 8; ++i) {
      float* data = (i % 2 == 0 && arena_ ? static_cast<float*>(arena_.get()) : ordinary_.data()) +
                    i * kCount;
      handles.push_back(hvd::allreduce_async(buffer(data, kCount), buffer(data, kCount),
                                             {.name = hvd::formatted("large.{}", i)}));
    }
    for (const auto& handle : handles) handle.wait();
  }

 private:
  static constexpr std::size_t kCount = 512 << 10;
  std::vector<float> small_ = std::vector<float>(16);
  std::vector<float> ordinary_ = std::vector<float>(8 * kCount);
  std::shared_ptr<void> arena_ = hvd::allocate_shared(8 * kCount * sizeof(float));
};

void die_later(const std::string& what, std::chrono::milliseconds after) {
  std::thread([=] {
    std::this_thread::sleep_for(after);
    if (what == "kill") std::raise(SIGKILL);
    std::raise(SIGSEGV);
  }).detach();
}

void run(const std::string& what, std::chrono::milliseconds when) {
  const int victim = std::min(2, hvd::size() - 1);
  const bool chosen = hvd::rank() == victim;
  Loop loop;
  loop.step();
  hvd::barrier();
  if (chosen && (what == "kill" || what == "segv")) die_later(what, when);
  const bool endless = what == "kill" || what == "segv";
  const bool uneven = what == "fewer" || what == "more";
  const int steps = uneven && chosen == (what == "fewer") ? 3 : 6;
  for (int i = 0; endless || i < steps; ++i) {
    if (uneven && i >= 3 && hvd::rank() == hvd::size() - 1) std::this_thread::sleep_for(when);
    if (chosen && i == 3) {
      if (what == "throw") throw std::runtime_error("this rank has had enough");
      if (what == "_exit") ::_exit(7);
      if (what == "exit0") std::exit(0);
      if (what == "late") std::this_thread::sleep_for(when);
    }
    loop.step();
  }
  if (uneven) return;
  hvd::shutdown();
  if (hvd::launcher_hints().rank.value_or(0) == 0) say("all steps done");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "fine";
  const auto when = std::chrono::milliseconds(argc > 2 ? std::atoi(argv[2]) : 100);
  const int rank = hvd::launcher_hints().rank.value_or(0);
  say(hvd::formatted("pid {}", ::getpid()));
  try {
    const hvd::Config config = hvd::Config::from_environment();
    hvd::init(config);
    if (rank == 0) say(hvd::formatted("fusion threshold {}", config.fusion_threshold_bytes));
    run(what, when);
  } catch (const hvd::Error& error) {
    say(hvd::formatted("rank {}: {}: {}", rank, type_of(error), error.what()));
    // the launcher ends the others soon after the first: let them speak
    std::this_thread::sleep_for(200ms);
    return 3;
  }
}
