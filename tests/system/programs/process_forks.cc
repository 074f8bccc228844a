// For tests/system/scripts/process_forks.sh: every rank forks in the midst of its allreduces, the
// child ends in its own way, and the ranks go on.
//   process_forks exit0 | exit1 | _exit | abort | kill | return | exec_fails | exec | system |
//   lives
// The child says "child: TYPE: TEXT" of each call of the library that throws. Exit code 0, and
// "rank N: all is well", where the ranks have the right sums afterwards.
#include <hvd/hvd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "tests/support/speak.h"

namespace {

using hvd::test::say;

constexpr std::size_t kCount = 1 << 16;

/// Values of this rank that all ranks of the host can reach, or ordinary ones where they share no
/// memory.
class Values {
 public:
  Values() : shared_(hvd::allocate_shared(kCount * sizeof(float))), own_(shared_ ? 0 : kCount) {}
  float* data() { return shared_ ? static_cast<float*>(shared_.get()) : own_.data(); }
  void fill(float value) { std::fill_n(data(), kCount, value); }
  bool all(float value) {
    return std::all_of(data(), data() + kCount, [&](float found) { return found == value; });
  }
  hvd::Buffer buffer() {
    return {data(), hvd::DataType::Float32, {static_cast<std::int64_t>(kCount)}, {}};
  }

 private:
  std::shared_ptr<void> shared_;
  std::vector<float> own_;
};

void refused(const char* name, const std::function<void()>& call) {
  try {
    call();
    say(hvd::formatted("child: {} did not throw", name));
  } catch (const hvd::Error& error) {
    say(hvd::formatted("child: {}: {}: {}", name, hvd::test::type_of(error), error.what()));
  }
}

void use_library(Values& values, const hvd::Handle<void>& handle) {
  values.fill(-1);  // its own copy
  if (hvd::is_initialized()) say("child: it is initialized");
  refused("rank", [] { hvd::rank(); });
  refused("init", [] { hvd::init(); });
  refused("wait", [&] { handle.wait(); });
  refused("done", [&] { static_cast<void>(handle.done()); });
  refused("allreduce", [&] { hvd::allreduce(values.buffer(), values.buffer()); });
  refused("barrier", [] { hvd::barrier(); });
  refused("allocate_shared", [] { hvd::allocate_shared(64); });
  hvd::shutdown();
}

/// Returns whether this is the child, and is to return from main().
bool fork_and_end(const std::string& way, Values& values, const hvd::Handle<void>& handle) {
  if (way == "system") {
    if (std::system("true") != 0) throw std::runtime_error("system");  // NOLINT: what is tested
    return false;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    if (way.starts_with("exec")) {
      ::execlp(way == "exec" ? "true" : "/no/such/program", "true", nullptr);
      std::exit(0);  // NOLINT: what is tested
    }
    use_library(values, handle);
    if (way == "exit0") std::exit(0);  // NOLINT
    if (way == "exit1") std::exit(1);  // NOLINT
    if (way == "_exit") ::_exit(0);
    if (way == "abort") std::abort();
    if (way == "kill") std::raise(SIGKILL);
    if (way == "lives") std::this_thread::sleep_for(std::chrono::seconds(1));
    return true;
  }
  if (way == "lives") return false;  // the child ends some time
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
    throw std::runtime_error("the child hangs");
  return false;
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::string way = argv[1];
  hvd::init();
  const int rank = hvd::rank();
  const auto ranks = static_cast<float>(hvd::size());
  const float expected = ranks * (ranks + 1) / 2;
  Values values;
  for (int step = 0; step < 6; ++step) {
    values.fill(static_cast<float>(rank + 1));
    const auto handle = hvd::allreduce_async(values.buffer(), values.buffer(),
                                             {.name = "step", .op = hvd::ReduceOp::Sum});
    Values other;  // of which the child has to let go, too
    other.fill(static_cast<float>(rank));
    if (step % 2 == 1 && fork_and_end(way, other, handle)) return 0;
    handle.wait();
    if (!values.all(expected) || !other.all(static_cast<float>(rank))) {
      say(hvd::formatted("rank {}: wrong values", rank));
      return 1;
    }
  }
  hvd::shutdown();
  hvd::init();
  hvd::barrier();
  hvd::shutdown();
  say(hvd::formatted("rank {}: all is well", rank));
  return 0;
}
