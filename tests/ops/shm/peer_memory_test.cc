// Memory of other processes that is read where it is, and operations in which ranks take from one
// another without their help.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "hvd/errors.h"
#include "ops/shm/memory/peer_memory.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr std::size_t kPage = 4096;

/// A child that is forked and does nothing until it is killed.
class Sleeper {
 public:
  Sleeper() : pid_(::fork()) {
    if (pid_ != 0) return;
    while (true) ::pause();
  }
  ~Sleeper() { end(); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  [[nodiscard]] pid_t pid() const { return pid_; }
  void end() {
    if (ended_) return;
    ended_ = true;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
  bool ended_ = false;
};

/// Returns whether this system lets a process read its child's memory.
bool may_read(pid_t child, const std::uint64_t& word) {
  return why_unreadable(child, &word, word).empty();
}

}  // namespace

TEST_CASE("peer memory: another process's is read where it is") {
  if (kSanitized) return;  // which do not like fork()
  std::vector<std::uint64_t> theirs(100'003);
  std::iota(theirs.begin(), theirs.end(), 7);
  Sleeper child;
  if (!may_read(child.pid(), theirs.front())) {
    MESSAGE("skipped: " << why_unreadable(child.pid(), theirs.data(), theirs.front()));
    return;
  }
  const auto expected = theirs;
  std::fill(theirs.begin(), theirs.end(), 0);  // the child has the old ones
  const PeerMemory peers({::getpid(), child.pid()}, 0, true);
  CHECK(peers.is_here(0));
  CHECK_FALSE(peers.is_here(1));
  CHECK(peers.can_be_read(theirs.data(), theirs.size() * 8));
  std::vector<std::uint64_t> got(theirs.size(), 1);
  CHECK(
      peers.read(1, got.data(), reinterpret_cast<const std::byte*>(theirs.data()), got.size() * 8));
  CHECK(got == expected);
  CHECK(peers.read(1, nullptr, nullptr, 0));
  CHECK(why_unreadable(child.pid(), theirs.data(), 8).find("something else") != std::string::npos);
  CHECK(why_unreadable(child.pid(), nullptr, 8).find("process_vm_readv: ") == 0);
  child.end();
  CHECK_FALSE(
      peers.read(1, got.data(), reinterpret_cast<const std::byte*>(theirs.data()), got.size() * 8));
}

TEST_CASE("peer memory: what others may not read is found before they are told of it") {
  if (kSanitized) return;
  void* const pages =
      ::mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(pages != MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(pages);
  std::memset(bytes, 3, 3 * kPage);
  ::mprotect(bytes + 2 * kPage, kPage, PROT_NONE);
  Sleeper child;
  const std::uint64_t word = 5;
  if (may_read(child.pid(), word)) {
    const PeerMemory peers({::getpid(), child.pid()}, 0, true);
    CHECK(peers.can_be_read(bytes, 2 * kPage));
    CHECK_FALSE(peers.can_be_read(bytes, 2 * kPage + 1));
    CHECK_FALSE(peers.can_be_read(bytes, 0));
    std::vector<std::byte> got(3 * kPage);
    CHECK_THROWS_AS(peers.read(1, got.data(), bytes, got.size()), BackendError);
    CHECK(got[2 * kPage - 1] == std::byte{3});
    CHECK_FALSE(PeerMemory({::getpid(), child.pid()}, 0, false).can_be_read(bytes, kPage));
  }
  ::munmap(pages, 3 * kPage);
}

TEST_CASE("peer memory: threads of one process read each other's as their own") {
  const PeerMemory peers({}, 0, true);
  const std::vector<int> there{1, 2, 3};
  std::vector<int> here(3);
  CHECK(peers.is_here(2));
  CHECK(peers.can_be_read(there.data(), 12));
  CHECK(peers.read(2, here.data(), reinterpret_cast<const std::byte*>(there.data()), 12));
  CHECK(here == there);
}

/// The first rank calls nothing after it has submitted, until the others have their results: its
/// coordination thread does its part.
TEST_CASE("taking from one another: a rank that computes does not hold the others up") {
  constexpr std::int64_t kCount = 3 << 18;
  for (const DirectCopies direct : {DirectCopies::On, DirectCopies::Relayed, DirectCopies::Off})
    for (const OpKind kind :
         {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter, OpKind::Broadcast})
      for (const int root : {0, 2}) {
        if (root != 0 && kind != OpKind::Broadcast) continue;
        CAPTURE(name_of(kind));
        WorldOptions options;
        options.size = 3;
        options.config.direct_copies = direct;
        ThreadWorld world(options);
        std::atomic<int> done{0};
        world.run([&](int rank, Engine& engine) {
          std::vector<float> input(kCount, static_cast<float>(rank + 1));
          std::vector<float> output;
          Submission submission = allreduce_of(input, "large", DataType::Float32);
          submission.kind = kind;
          submission.root = root;
          auto& tensor = submission.tensors.front();
          if (kind != OpKind::Broadcast) {
            tensor.output = nullptr;
            submission.allocate = [&](std::size_t, std::int64_t rows) -> void* {
              output.resize(static_cast<std::size_t>(rows));
              return output.data();
            };
          }
          if (kind == OpKind::Alltoall) tensor.splits = {kCount / 4, kCount / 4, kCount / 2};
          const auto pending =
              engine.submit(std::move(submission), rank == 0 ? After::Return : After::Wait);
          while (rank == 0 && done.load() < 2) std::this_thread::yield();
          engine.wait(*pending);
          ++done;
          const auto expect = [&](std::size_t place, float value) {
            CHECK((kind == OpKind::Broadcast ? input : output).at(place) == value);
          };
          if (kind == OpKind::Broadcast) expect(kCount - 1, static_cast<float>(root + 1));
          if (kind == OpKind::Reducescatter) expect(0, 6);
          if (kind != OpKind::Allgather && kind != OpKind::Alltoall) return;
          const std::size_t part = output.size() / 3;
          for (std::size_t from = 0; from < 3; ++from)
            expect(from * part + part - 1, static_cast<float>(from + 1));
        });
      }
}

}  // namespace hvd::test
