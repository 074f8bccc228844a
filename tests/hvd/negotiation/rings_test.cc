// Frames through the rings of a board: whole, in order, for any sizes, with a full ring on the way.
#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "hvd/negotiation/board/board.h"
#include "hvd/negotiation/board/layout.h"

namespace hvd {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

/// A board of ordinary memory.
struct Memory {
  explicit Memory(int ranks) : lines(Board::bytes_needed(ranks, 16) / sizeof(Line) + 1) {
    Board::format(block(), ranks, 16);
  }
  std::span<std::byte> block() { return {lines.front().bytes, lines.size() * sizeof(Line)}; }
  std::vector<Line> lines;
};

Bytes payload_of(std::uint64_t number, std::size_t bytes) {
  Bytes payload(bytes);
  for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(number * 31 + i);
  return payload;
}
/// Sizes about lines, and those that wrap in every way.
std::size_t bytes_of(std::uint64_t number, std::size_t most) {
  return number % 5 == 0 ? number * 977 % most : number * 13 % 300;
}

PeerFrameHead head_of(std::uint64_t number, std::size_t bytes) {
  PeerFrameHead head;
  head.kind = PeerFrameKind::Chunk;
  head.id = number;
  head.bytes = bytes;
  return head;
}

const auto nothing = [](int) {};

TEST_CASE("frames of two threads that write and read at once come whole and in order") {
  Memory memory(2);
  Board writer(memory.block(), 0), reader(memory.block(), 1);
  constexpr std::uint64_t kFrames = 20'000;
  std::thread writing([&] {
    for (std::uint64_t number = 0; number < kFrames; ++number) {
      const Bytes payload = payload_of(number, bytes_of(number, writer.rings().most_bytes()));
      while (!writer.rings().put(1, head_of(number, payload.size()), payload))
        std::this_thread::yield();
    }
  });
  std::uint64_t seen = 0;
  bool right = true;
  while (seen < kFrames) {
    reader.rings().take(
        16,
        [&](int from, const PeerFrameHead& head, const PeerPayload& payload) {
          Bytes got(payload.size());
          payload.copy_to(got.data());
          right = right && from == 0 && head.id == seen &&
                  got == payload_of(seen, bytes_of(seen, reader.rings().most_bytes()));
          ++seen;
        },
        nothing);
    if (!reader.rings().has_any()) std::this_thread::yield();
  }
  writing.join();
  CHECK(right);
  CHECK(!reader.rings().has_any());
}

TEST_CASE("a payload that looks like a later frame's word is taken for none") {
  Memory memory(2);
  Board writer(memory.block(), 0), reader(memory.block(), 1);
  const std::size_t ring = board_layout::ring_bytes(2);
  std::uint64_t position = 0;
  for (int lap = 0; lap < 3; ++lap) {
    // Each word of the payload is what would say, one lap later, that a frame is there.
    std::vector<std::uint64_t> words(ring / 8 / sizeof(std::uint64_t));
    const std::uint64_t begin = position + sizeof(PeerFrameHead);
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = begin + i * sizeof words[0] + ring + 1;
    for (std::uint64_t end = position + ring; position < end;) {
      REQUIRE(writer.rings().put(1, head_of(7, words.size() * 8), std::as_bytes(std::span(words))));
      CHECK(reader.rings().take(
                10, [](int, const PeerFrameHead& head, const PeerPayload&) { CHECK(head.id == 7); },
                nothing) == 1);
      CHECK(!reader.rings().has_any());
      position += sizeof(PeerFrameHead) + words.size() * 8;
    }
  }
}

TEST_CASE("a full ring takes nothing, says when there is room, and rings who waits for it") {
  Memory memory(3);
  Board writer(memory.block(), 2), reader(memory.block(), 0);
  const Bytes payload = payload_of(1, 1000);
  int put = 0;
  while (writer.rings().put(0, head_of(1, payload.size()), payload)) ++put;
  CHECK(put > 10);
  CHECK(!writer.rings().has_room(0, payload.size()));
  CHECK(!reader.rings().calls(2, Rings::kForRoom));
  writer.rings().set_call(Rings::kForRoom);
  CHECK(reader.rings().calls(2, Rings::kForRoom));
  CHECK(!reader.rings().calls(2, Rings::kForFrames));
  int freed = 0, taken = 0;
  while (reader.rings().has_any())
    taken += static_cast<int>(reader.rings().take(
        1, [](int from, const PeerFrameHead&, const PeerPayload&) { CHECK(from == 2); },
        [&](int from) {
          CHECK(from == 2);
          ++freed;
        }));
  CHECK(taken == put);
  CHECK(freed >= 2);
  CHECK(writer.rings().has_room(0, payload.size()));
}

TEST_CASE("rings are as large as the number of ranks lets them be") {
  CHECK(board_layout::ring_bytes(2) == std::size_t{256} << 10);
  CHECK(board_layout::ring_bytes(16) == std::size_t{256} << 10);
  CHECK(board_layout::ring_bytes(64) == std::size_t{16} << 10);
  CHECK(board_layout::ring_bytes(1000) == std::size_t{16} << 10);
}

}  // namespace
}  // namespace hvd
