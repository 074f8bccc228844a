/// Messages' bytes: which blocks come back, and that nothing is written to new bytes unasked.

#include "hvd/base/message_memory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "hvd/base/wire.h"

namespace hvd::test {

TEST_CASE("message memory: bytes have the values that are given, also those that grow and move") {
  Bytes bytes(3, std::byte{7});
  bytes.resize(message_memory::kLeastBytes, std::byte{8});
  bytes.push_back(std::byte{9});
  const Bytes copy = bytes;
  Bytes other = Writer(std::move(bytes)).put(std::uint8_t{10}).take();
  REQUIRE(other.size() == message_memory::kLeastBytes + 2);
  CHECK(std::equal(copy.begin(), copy.end(), other.begin()));
  CHECK(std::count(other.begin(), other.end(), std::byte{8}) ==
        static_cast<std::ptrdiff_t>(message_memory::kLeastBytes) - 3);
  CHECK(other.back() == std::byte{10});
}

TEST_CASE(
    "message memory: a block that was freed serves the next of whatever size it has room for") {
  for (const std::size_t bytes : {message_memory::kLeastBytes, message_memory::kLeastBytes + 1001,
                                  message_memory::kBlockBytes}) {
    CAPTURE(bytes);
    const std::byte* before = nullptr;
    {
      Bytes first(bytes);
      before = first.data();
      std::memset(first.data(), 1, bytes);
    }
    const std::vector<std::byte> others(message_memory::kBlockBytes);  // where it was given back
    const Bytes again(message_memory::kBlockBytes);
    if constexpr (message_memory::kCaches) CHECK(again.data() == before);
  }
}

TEST_CASE(
    "message memory: no two have the same memory, from several threads and beyond the cache") {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kBlocks =
      2 * message_memory::kCachedBytes / message_memory::kBlockBytes / kThreads;
  std::vector<std::thread> threads;
  std::vector<std::size_t> wrong(kThreads);
  for (std::size_t thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 3; ++round) {
        std::vector<Bytes> all;
        for (std::size_t block = 0; block < kBlocks; ++block) {
          all.emplace_back(message_memory::kLeastBytes + block);
          std::memset(all.back().data(), static_cast<int>(16 * thread + block % 16),
                      all.back().size());
        }
        for (std::size_t block = 0; block < kBlocks; ++block)
          for (const std::byte one : all[block])
            wrong[thread] += one != static_cast<std::byte>(16 * thread + block % 16) ? 1 : 0;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<std::size_t>(kThreads));
}

}  // namespace hvd::test
