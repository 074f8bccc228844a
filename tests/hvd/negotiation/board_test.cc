/// The board: its log, its slots, its failure.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hvd/negotiation/board/board.h"

namespace hvd::test {
namespace {

/// Memory of a board whose ranks are of this process.
class BoardMemory {
 public:
  BoardMemory(int ranks, std::uint32_t slots)
      : bytes_(Board::bytes_needed(ranks, slots)),
        memory_(
            ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    REQUIRE(memory_ != MAP_FAILED);
    Board::format(block(), ranks, slots);
  }
  ~BoardMemory() { ::munmap(memory_, bytes_); }
  BoardMemory(const BoardMemory&) = delete;
  BoardMemory& operator=(const BoardMemory&) = delete;
  [[nodiscard]] std::span<std::byte> block() const {
    return {static_cast<std::byte*>(memory_), bytes_};
  }

 private:
  std::size_t bytes_;
  void* memory_;
};

}  // namespace

TEST_CASE(
    "the board's log: all read the same, round and round; it is full until the slowest has read") {
  const BoardMemory memory(2, 16);
  Board writer(memory.block(), 0);
  Board reader(memory.block(), 1);
  std::uint64_t written = 0;
  std::uint64_t read = 0;
  bool was_full = false;
  for (int i = 0; i < 3000; ++i) {
    const Bytes record(1000 + static_cast<std::size_t>(i) * 7 % 5000, static_cast<std::byte>(i));
    const BoardLock lock(writer);
    if (!writer.log().has_room(record.size())) {
      was_full = true;
      while (auto one = reader.log().read_next()) {
        CHECK((*one)[0] == static_cast<std::byte>(read));
        CHECK(one->size() == 1000 + read * 7 % 5000);
        ++read;
      }
      REQUIRE(writer.log().has_room(record.size()));
    }
    writer.log().append(record);
    ++written;
  }
  while (reader.log().read_next()) ++read;
  CHECK(was_full);
  CHECK(read == written);
  CHECK_FALSE(writer.log().read_next().has_value());  // an appender has read what it wrote
}

TEST_CASE(
    "the board's log: a record counts as read when its reader comes for the next, having acted on "
    "it") {
  const BoardMemory memory(2, 16);
  Board writer(memory.block(), 0);
  Board reader(memory.block(), 1);
  std::uint64_t after_first = 0;
  {
    const BoardLock lock(writer);
    writer.log().append(Bytes(7));
    after_first = writer.log().tail();
    writer.log().append(Bytes(9));
  }
  CHECK(reader.log().read_next()->size() == 7);
  CHECK(writer.log().read_position(1) == 0);
  CHECK(reader.log().read_next()->size() == 9);
  CHECK(writer.log().read_position(1) == after_first);
  CHECK_FALSE(reader.log().read_next().has_value());
  CHECK(writer.log().read_position(1) == writer.log().tail());
  CHECK(writer.log().slowest_reader() == writer.log().tail());
}

TEST_CASE("slots: arrivals, generations, and locations of two rounds") {
  const BoardMemory memory(2, 16);
  Board a(memory.block(), 0);
  Board b(memory.block(), 1);
  a.rounds().set_location(3, 11);
  CHECK(a.rounds().arrive(3, 0) == 1);
  CHECK_FALSE(a.rounds().has_arrived_too(3, 1));
  b.rounds().set_location(3, 12);
  CHECK(b.rounds().arrive(3, 0) == 2);
  CHECK(b.rounds().coming_location(3, 0) == 11);
  {
    const BoardLock lock(b);
    b.rounds().reset_arrivals(3, 1);
  }
  CHECK(a.rounds().has_arrived_too(3, 1));  // still asked about the round that is over
  a.rounds().set_location(3, 21);           // already in the next round
  CHECK(a.rounds().arrive(3, 0) == 1);
  CHECK(b.rounds().location(3, 0) == 11);  // what a late reader of the last round needs
  CHECK(b.rounds().coming_location(3, 0) == 21);
  {
    const BoardLock lock(b);
    CHECK_FALSE(b.rounds().evict(3));  // somebody is there
    CHECK(b.rounds().evict(4));
  }
  CHECK(a.rounds().arrive(4, 0) == 0);  // an old generation
  CHECK(a.rounds().arrive(4, 1) == 1);
}

TEST_CASE("the board's failure: known to whoever has said one, when two ranks say theirs at once") {
  constexpr int kRanks = 2;
  for (int round = 0; round < 2000; ++round) {
    const BoardMemory memory(kRanks, 1);
    std::array<Status, kRanks> seen;
    std::atomic<int> ready{0};
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] {
        Board board(memory.block(), rank);
        const Status own{Status::Code::BackendError,
                         "rank " + std::to_string(rank) + std::string(2000, '.')};
        ++ready;
        while (ready.load() < kRanks) std::this_thread::yield();
        board.set_failure(own);
        seen[static_cast<std::size_t>(rank)] = board.failure();
      });
    ranks.clear();
    for (const Status& status : seen) {
      REQUIRE(status.code() == Status::Code::BackendError);
      REQUIRE(status.text() == seen[0].text());
    }
  }
}

}  // namespace hvd::test
