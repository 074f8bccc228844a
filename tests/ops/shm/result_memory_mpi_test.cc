/// Results in recycled memory, between processes: of the arena, or where ranks share none, of each
/// process; and what children that are forked see of them.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/stats.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

constexpr std::size_t kGiven = 300'000;  // that each rank gives, and 1.1 MiB of floats

float element_of(int rank, std::size_t element, int step) {
  return static_cast<float>(rank * 1000 + step) + static_cast<float>(element % 997);
}

std::vector<float> elements_of(int rank, int step) {
  std::vector<float> values(kGiven);
  for (std::size_t i = 0; i < kGiven; ++i) values[i] = element_of(rank, i, step);
  return values;
}

Buffer floats_in(std::vector<float>& values) {
  return {values.data(), DataType::Float32, {static_cast<std::int64_t>(values.size())}, {}};
}

Gathered gather(int step) {
  auto values = elements_of(rank(), step);
  return allgather(floats_in(values), {.name = "g"});
}

bool has_elements(const std::byte* bytes, int ranks, int step) {
  for (int rank = 0; rank < ranks; ++rank) {
    const auto expected = elements_of(rank, step);
    if (std::memcmp(bytes + static_cast<std::size_t>(rank) * kGiven * 4, expected.data(),
                    kGiven * 4) != 0)
      return false;
  }
  return true;
}
bool is_right(const Gathered& result, int step) {
  return result.data.size() == kGiven * 4 * static_cast<std::size_t>(size()) &&
         has_elements(result.data.data(), size(), step);
}

bool shares_arena() { return engine()->topology().domain_ranks.size() > 1; }

}  // namespace

TEST_CASE("results come back in a steady loop, with shared memory and without; 0 turns that off") {
  for (const SharedMemory shared : {SharedMemory::Auto, SharedMemory::Off})
    for (const std::uint64_t kept : {std::uint64_t{64} << 20, std::uint64_t{0}}) {
      Config config;
      config.shared_memory = shared;
      config.result_pool_bytes = kept;
      init(config);
      std::optional<Gathered> result = gather(0);
      int again = 0;
      for (int step = 1; step < 5; ++step) {
        const std::byte* const place = result->data.data();
        result.reset();
        result = gather(step);
        again += result->data.data() == place ? 1 : 0;
        CHECK(is_right(*result, step));
      }
      if (kept > 0) CHECK(again == 4);
      auto values = elements_of(rank(), 7);
      const auto handle = allgather_async(floats_in(values), {.name = "async"});
      Gathered first = handle.wait();
      first.data[0] = std::byte{77};
      CHECK(is_right(handle.wait(), 7));
      const std::vector<std::int64_t> splits(static_cast<std::size_t>(size()),
                                             static_cast<std::int64_t>(kGiven) / size());
      const auto exchanged = alltoall_async(floats_in(values), {.name = "x", .splits = splits});
      CHECK(exchanged.wait().data == exchanged.wait().data);

      // What a result goes into next needs no copy of it where it is in the arena.
      const auto before = stats().bytes_zero_copy;
      const Buffer again_in{result->data.data(), DataType::Float32, result->shape, {}};
      allreduce(again_in, again_in, {.name = "of a result", .op = ReduceOp::Max});
      CHECK(is_right(*result, 4));
      CHECK((stats().bytes_zero_copy > before) == (kept > 0 && shares_arena()));
      shutdown();
      CHECK(has_elements(result->data.data(), mpi_size(), 4));
    }
}

TEST_CASE(
    "results that are held leave the arena to others, and the last of them have ordinary memory") {
  Config config;
  config.arena_bytes = 48 << 20;
  init(config);
  std::vector<Gathered> held;
  for (int step = 0; step < 16; ++step) held.push_back(gather(step));
  for (int step = 0; step < 16; ++step) CHECK(is_right(held[static_cast<std::size_t>(step)], step));
  if (shares_arena()) CHECK(allocate_shared(30 << 20) != nullptr);
  held.clear();
  CHECK(is_right(gather(3), 3));
  shutdown();
}

TEST_CASE(
    "a child sees a result as it was when it was forked, whatever the rank does with the memory") {
  Config config;
  init(config);
  const int ranks = size();
  std::optional<Gathered> result = gather(1);
  int go[2];
  REQUIRE(::pipe(go) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    char byte = 0;
    const bool told = ::read(go[0], &byte, 1) == 1;
    ::_exit(told && has_elements(result->data.data(), ranks, 1) ? 0 : 1);
  }
  const std::byte* const place = result->data.data();
  result.reset();
  bool reused = false;
  for (int step = 2; step < 6; ++step) {
    const Gathered next = gather(step);
    reused = reused || next.data.data() == place;
    CHECK(is_right(next, step));
  }
  CHECK((!reused || !shares_arena()));
  REQUIRE(::write(go[1], "x", 1) == 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  for (int step = 2; step < 6; ++step) {  // the child is gone: the memory comes back
    std::vector<Gathered> several;
    for (int i = 0; i < 3; ++i) several.push_back(gather(step + i));
    for (const auto& one : several) reused = reused || one.data.data() == place;
  }
  CHECK((reused || !shares_arena()));
  for (const int end : go) ::close(end);
  shutdown();
}

}  // namespace hvd::test
