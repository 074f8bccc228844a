// Blocks of shared memory: sealed, private in a child that is forked, and beyond the arena where
// that is full.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include "hvd/base/process.h"
#include "hvd/engine/core/caller_threads.h"
#include "ops/shm/memory/overflow.h"
#include "ops/shm/memory/shared_memory.h"
#include "ops/shm/memory/staging.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Returns the exit status of a child that does `work`.
template <class Work>
int in_child(Work work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("shared memory: no process can change the size of a block") {
  const FileDescriptor file = make_shared_file("hvd-test", kMiB);
  const auto mapping = map_file(file, kMiB);
  for (const off_t size : {off_t{0}, off_t{4096}, off_t{2 * kMiB}}) {
    errno = 0;
    CHECK(::ftruncate(file.get(), size) == -1);
    CHECK(errno == EPERM);
  }
  CHECK(::fcntl(file.get(), F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
  const auto other = map_ticket(ticket_of(file, kMiB));
  mapping->bytes()[kMiB - 1] = std::byte{77};
  CHECK(other->bytes()[kMiB - 1] == std::byte{77});
  CHECK_THROWS_AS(map_ticket(ticket_of(file, kMiB + 1)), BackendError);
}

TEST_CASE("shared memory: a block of the same size is not taken for another") {
  const FileDescriptor file = make_shared_file("hvd-test", kMiB);
  const FileDescriptor other = make_shared_file("hvd-test", kMiB);
  const Ticket ticket = ticket_of(file, kMiB);
  CHECK(map_ticket(ticket)->bytes().size() == kMiB);
  Ticket of_another_container = ticket;
  of_another_container.descriptor = other.get();
  CHECK_THROWS_WITH_AS(map_ticket(of_another_container),
                       "shared memory: another rank's block is not where it should be; is that "
                       "rank in another container?: Stale file handle",
                       BackendError);
}

TEST_CASE(
    "shared memory: a child that is forked reads what was there, and what it writes is its own") {
  if (kSanitized) return;  // which do not like fork()
  const FileDescriptor file = make_shared_file("hvd-test", kMiB);
  auto mapping = map_file(file, kMiB);
  std::byte* const bytes = mapping->bytes().data();
  bytes[5] = std::byte{1};
  const MadeHere made;
  const int status = in_child([&] {
    if (bytes[5] != std::byte{1}) return 1;
    bytes[5] = std::byte{2};
    bytes[9999] = std::byte{2};
    mapping.reset();  // leaves the addresses alone
    if (bytes[5] != std::byte{2}) return 2;
    const auto again = map_file(file, kMiB);
    again->bytes()[7] = std::byte{3};  // and what it maps itself is shared
    return 0;
  });
  CHECK(status == 0);
  CHECK(bytes[5] == std::byte{1});
  CHECK(bytes[9999] == std::byte{0});
  CHECK(bytes[7] == std::byte{3});
  CHECK(made.still_here());
}

TEST_CASE("a process that is forked from a rank knows it") {
  if (kSanitized) return;
  become_rank(3);
  const MadeHere made;
  const auto refused = [&] {
    try {
      const LibraryCall call;
    } catch (const NotInitialized& error) {
      return std::strstr(error.what(), "forked from rank 3") != nullptr && is_forked_from_rank() &&
                     !made.still_here()
                 ? 0
                 : 1;
    }
    return 2;
  };
  CHECK(in_child(refused) == 0);
  CHECK(in_child([&] { return in_child(refused); }) == 0);
  cease_to_be_rank();
  CHECK(in_child(refused) == 2);
  CHECK(!is_forked_from_rank());
}

TEST_CASE("overflow: blocks that other ranks find, used again when they are free") {
  Overflow owner({}, 0);
  Overflow reader({}, 1);
  std::vector<std::uint64_t> words;
  for (std::size_t i = 0; i < 40; ++i) {
    const std::size_t bytes = i * i * 100 * 1024 + 1;  // up to 152 MiB
    words.push_back(owner.allocate(bytes));
    std::memset(owner.address(0, words.back()), static_cast<int>(i),
                std::min<std::size_t>(bytes, 4096));
    owner.address(0, words.back())[bytes - 1] = static_cast<std::byte>(i);
  }
  for (std::size_t i = 0; i < words.size(); ++i) {
    CHECK(reader.address(0, words[i])[0] == static_cast<std::byte>(i));
    CHECK(reader.address(0, words[i])[i * i * 100 * 1024] == static_cast<std::byte>(i));
  }
  const std::uint64_t last = words.back();
  owner.free(last);
  CHECK(owner.allocate(39 * 39 * 100 * 1024) == last);
}

TEST_CASE("staging: in the arena while there is room, beyond it afterwards") {
  const FileDescriptor file = make_shared_file("hvd-test", kMiB);
  const auto mapping = map_file(file, kMiB);
  const auto arena = std::make_shared<Arena>(mapping->bytes());
  Staging mine({{}, {mapping->bytes(), {}}, nullptr, {}}, arena, 0);
  Staging other({{}, {mapping->bytes(), {}}, nullptr, {}}, nullptr, 1);
  std::vector<float> values(200'000);
  std::iota(values.begin(), values.end(), 1.0F);
  const std::size_t bytes = values.size() * sizeof(float);
  const auto within = mine.stage(values.data(), bytes);
  const auto beyond = mine.stage(values.data(), bytes);
  CHECK(arena->contains(mine.address(0, within)));
  CHECK(!arena->contains(mine.address(0, beyond)));
  for (const auto location : {within, beyond}) {
    CHECK(Staging::is_staged(location));
    CHECK(std::memcmp(other.address(0, location), values.data(), bytes) == 0);
  }
  CHECK(!mine.keep(bytes));
  std::vector<float> output(values.size());
  mine.take_out(beyond, output.data(), bytes);
  CHECK(output == values);
  CHECK(mine.stage(nullptr, bytes) == beyond);
  mine.release(within);
  CHECK(arena->used_bytes() == 0);
  CHECK(mine.keep(bytes));
}

TEST_CASE("a full arena: tensors that it has no room for are reduced all the same") {
  for (const int domains : {1, 2}) {
    WorldOptions options{.size = 4, .domains = domains};
    options.config.arena_bytes = kMiB;
    ThreadWorld world(options);
    world.run([](int rank, Engine& engine) {
      constexpr std::size_t kTensors = 12;
      for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<float>> values;
        std::vector<std::shared_ptr<HandleState>> pending;
        for (std::size_t i = 0; i < kTensors; ++i) {
          values.emplace_back(1 + i * 40'000,
                              static_cast<float>((rank + 1) * static_cast<int>(i + 1)));
          pending.push_back(
              engine.submit(allreduce_of(values[i], "t" + std::to_string(i), DataType::Float32)));
        }
        for (std::size_t i = 0; i < kTensors; ++i) {
          engine.wait(*pending[i]);
          const bool right = values[i].front() == 10.0F * static_cast<float>(i + 1) &&
                             values[i].back() == values[i].front();
          CHECK(right);
        }
      }
    });
  }
}

}  // namespace hvd::test
