/// Messages between leaders: whole, in order, of any size, and a drained end.

#include "ops/p2p/transport.h"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <string_view>
#include <thread>

#include "tests/support/mpi_world.h"

namespace hvd::test {
namespace {

std::vector<int> all_ranks() {
  std::vector<int> ranks(static_cast<std::size_t>(mpi_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::size_t length_of(int number) {
  return number % 5 == 0 ? std::size_t{3000000} : static_cast<std::size_t>(number * 41);
}

}  // namespace

TEST_CASE("messages arrive whole and in the order of each sender, small ones behind large ones") {
  P2pTransport transport(open_wire()(), all_ranks(), all_ranks(), mpi_rank());
  CHECK(transport.domain() == mpi_rank());
  CHECK(transport.domains() == mpi_size());
  constexpr int kMessages = 40;
  for (int number = 0; number < kMessages; ++number)
    for (int to = 0; to < mpi_size(); ++to)
      if (to != mpi_rank())
        transport.send(
            to, share(Bytes(length_of(number), static_cast<std::byte>(number + mpi_rank()))));
  std::vector<int> next(static_cast<std::size_t>(mpi_size()), 0);
  std::size_t wrong = 0;
  for (int awaited = kMessages * (mpi_size() - 1); awaited > 0;) {
    const auto message = transport.receive();
    if (!message) {
      std::this_thread::yield();
      continue;
    }
    --awaited;
    const int number = next[static_cast<std::size_t>(message->from)]++;
    if (message->bytes != Bytes(length_of(number), static_cast<std::byte>(number + message->from)))
      ++wrong;
  }
  CHECK(wrong == 0);
  CHECK(transport.drain(std::chrono::seconds(10)));
  CHECK(!transport.receive());
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_CASE(
    "a transport that ends with messages under way leaves nothing behind that harms the next") {
  for (int round = 0; round < 3; ++round) {
    P2pTransport transport(open_wire()(), all_ranks(), all_ranks(), mpi_rank());
    for (int to = 0; to < mpi_size(); ++to)
      if (to != mpi_rank()) transport.send(to, share(Bytes(1000000)));
    MPI_Barrier(MPI_COMM_WORLD);
    transport.receive();
  }
}

TEST_CASE("MPI: what a world that has failed leaves on the way does not reach the next one") {
  static const Bytes left(100, std::byte{7});  // MPI may look at it later
  constexpr int kTag = 5;
  for (int round = 0; round < 50; ++round) {
    {
      MpiPointToPoint failed(MpiComm::duplicate(MPI_COMM_WORLD),
                             std::make_shared<std::atomic<bool>>(false));
      for (int to = 0; to < mpi_size(); ++to) {
        if (to == mpi_rank()) continue;
        Posted posted = failed.send(left, to, kTag, SendMode::Ordinary);
        failed.drop(posted);
      }
    }
    MpiPointToPoint next(MpiComm::duplicate(MPI_COMM_WORLD));
    MPI_Barrier(MPI_COMM_WORLD);
    int received = 0;
    for (int look = 0; look < 100; ++look) received += next.claim(kTag) ? 1 : 0;
    REQUIRE(received == 0);
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

TEST_CASE("UCX prints no more than before where one world ends and another one goes on") {
  if (Config::from_environment().wire != Wire::Ucx) return;
  MakePointToPoint ended = open_wire();
  const MakePointToPoint going_on = open_wire();
  ended = nullptr;
  void* const library = ::dlopen("libucs.so.0", RTLD_LAZY | RTLD_NOLOAD);
  REQUIRE(library != nullptr);
  using GetOption = int(const char* name, char* value, std::size_t size);
  void* const found = ::dlsym(library, "ucs_global_opts_get_value");
  REQUIRE(found != nullptr);
  auto* const get = reinterpret_cast<GetOption*>(found);
  std::array<char, 32> level{};
  CHECK(get("LOG_LEVEL", level.data(), level.size()) == 0);
  CAPTURE(level.data());
  CHECK(std::string_view(level.data()) != "WARN");
  CHECK(std::string_view(level.data()) != "warn");
  ::dlclose(library);
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace hvd::test
