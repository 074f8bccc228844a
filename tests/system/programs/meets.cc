// A rank that does not care who has started it: meets [WHAT]. Prints who it is, what it needed, and
// a hash of all bits that collectives gave it, so that ways to start can be compared; exit code 3
// after an error of hvd's, which it prints.
//   sums     (default) init(), sums and others, shutdown(); and once more
//   dies     rank 1 dies in the middle, the others say what they learn
//   fewer    the world loses a rank (rank 1, or the one that is given), and those that are left
//            make another one, of their own
//   late     rank 0 comes to init() a second late
//   leaves   rank 1 ends with exit code 7 before init()
//   waits    after init() for ever
//   prints HOW   a line by printf before init() and one by std::cout after it, both without a
//                flush; then it waits for ever (waits), calls std::abort() (abort), throws an
//                exception that nobody catches (throw), or returns (ends)
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/hvd.h"
#include "tests/support/speak.h"

namespace {

using namespace std::chrono_literals;
using hvd::test::say;

/// FNV-1a
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i)
      value_ = (value_ ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3U;
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325U;
};

/// Sums depend on the order in which they are made.
std::vector<float> numbers(std::size_t count, unsigned salt) {
  std::vector<float> made(count);
  std::uint64_t state = salt * 7919U + static_cast<unsigned>(hvd::rank()) * 104729U + 1;
  for (float& value : made) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    value = static_cast<float>(static_cast<std::int64_t>(state)) * 0x1p-50F;
  }
  return made;
}

hvd::Buffer buffer_of(std::vector<float>& values) {
  return {.data = values.data(),
          .dtype = hvd::DataType::Float32,
          .shape = {static_cast<std::int64_t>(values.size())}};
}

std::uint64_t compute() {
  Hash hash;
  unsigned salt = 0;
  for (const std::size_t count : {1U, 7U, 1000U, 65537U, 300000U}) {
    for (const auto op : {hvd::ReduceOp::Sum, hvd::ReduceOp::Average, hvd::ReduceOp::Adasum}) {
      auto values = numbers(count, ++salt);
      hvd::allreduce(buffer_of(values), buffer_of(values), {.op = op});
      hash.add(values.data(), count * sizeof(float));
    }
    auto values = numbers(count + static_cast<std::size_t>(hvd::rank()), ++salt);
    const auto all = hvd::allgather(buffer_of(values));
    hash.add(all.data.data(), all.data.size());
  }
  return hash.value();
}

/// Is not linked with MPI: looks for what hvd has opened.
bool mpi_is_started() {
  int started = 0;
  auto* const ask = reinterpret_cast<int (*)(int*)>(::dlsym(RTLD_DEFAULT, "MPI_Initialized"));
  return ask != nullptr && ask(&started) == 0 && started != 0;
}

void print(const std::string& how) {
  std::printf("said before init()\n");
  hvd::init();
  std::cout << "said after init()\n";
  try {
    hvd::barrier();  // nobody dies before the others have said theirs
  } catch (const hvd::Error&) {
  }
  if (how == "waits") std::this_thread::sleep_for(1h);
  if (how == "abort") std::abort();
  if (how == "throw") throw std::runtime_error("nobody catches this");
}

void run(const std::string& what) {
  if (what == "late" && hvd::launcher_hints().rank == 0) std::this_thread::sleep_for(1s);
  if (what == "leaves" && hvd::launcher_hints().rank == 1) ::_exit(7);
  for (int again = 0; again < 2; ++again) {
    hvd::init();
    if (what == "waits") {
      say(hvd::formatted("rank {} waits", hvd::rank()));
      std::this_thread::sleep_for(1h);
    }
    if (what == "dies" && hvd::rank() == 1) ::_exit(0);
    say(hvd::formatted("rank {} of {}, {} of {} here: {:016x}, MPI {}", hvd::rank(), hvd::size(),
                       hvd::local_rank(), hvd::local_size(), compute(),
                       mpi_is_started() ? "is used" : "is not used"));
    hvd::shutdown();
  }
}

void lose(int lost) {
  hvd::init();
  const int rank = hvd::rank(), size = hvd::size();
  try {
    compute();
    hvd::barrier();
    if (rank == lost) ::_exit(0);
    for (;;) compute();
  } catch (const hvd::RankFailed&) {
  }
  hvd::shutdown();
  ::setenv("RANK", std::to_string(rank > lost ? rank - 1 : rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(size - 1).c_str(), 1);
  ::unsetenv("LOCAL_RANK");
  ::unsetenv("LOCAL_WORLD_SIZE");
  for (int again = 0; again < 2; ++again) {
    hvd::init();
    say(hvd::formatted("rank {} of {} goes on as rank {} of {}: {:016x}", rank, size, hvd::rank(),
                       hvd::size(), compute()));
    hvd::shutdown();
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string what = argc > 1 ? argv[1] : "sums";
    if (what == "prints") {
      print(argc > 2 ? argv[2] : "ends");
    } else if (what == "fewer") {
      lose(argc > 2 ? std::stoi(argv[2]) : 1);
    } else {
      run(what);
    }
  } catch (const hvd::Error& error) {
    say(hvd::formatted("rank {}: {}: {}", hvd::launcher_hints().rank.value_or(-1),
                       hvd::test::type_of(error), error.what()));
    return 3;
  }
  return 0;
}
