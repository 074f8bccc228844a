// Blocks of shared memory: sealed, and private in a child that is forked.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "hvd/base/process.h"
#include "ops/shm/shared_memory.h"
#include "tests/support/sanitized.h"

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

TEST_CASE("shared memory: a child that is forked reads what was there, and what it writes is its own") {
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
      return std::strstr(error.what(), "forked from rank 3") != nullptr && is_forked_from_rank() && !made.still_here() ? 0 : 1;
    }
    return 2;
  };
  CHECK(in_child(refused) == 0);
  CHECK(in_child([&] { return in_child(refused); }) == 0);
  cease_to_be_rank();
  CHECK(in_child(refused) == 2);
  CHECK(!is_forked_from_rank());
}

}  // namespace hvd::test
