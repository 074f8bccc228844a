/// ResultBytes: whose memory they take, and what they share with the vectors that results were
/// once.
#include "hvd/result_bytes.h"

#include <doctest/doctest.h>

#include <array>
#include <span>
#include <vector>

namespace hvd::test {
namespace {

std::vector<std::byte> numbers(std::size_t count) {
  std::vector<std::byte> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::byte>(i * 7 + 1);
  return values;
}

}  // namespace

TEST_CASE("bytes of a result: in memory that they are given, or in their own") {
  std::array<std::byte, 4> given{};
  bool freed = false;
  {
    ResultBytes bytes(std::shared_ptr<void>(given.data(), [&](void*) { freed = true; }), 4);
    CHECK(bytes.data() == given.data());
    ResultBytes taken = std::move(bytes);
    CHECK(taken.data() == given.data());
    CHECK(taken.size() == 4);
    CHECK(bytes.empty());  // NOLINT(bugprone-use-after-move): what is tested
    const ResultBytes copy = taken;
    CHECK(copy.data() != given.data());
    CHECK(copy == taken);
    taken[2] = std::byte{9};
    CHECK_FALSE(copy == taken);
    CHECK_FALSE(freed);
  }
  CHECK(freed);
  const ResultBytes own(nullptr, 3);
  CHECK(own.data() != nullptr);
  CHECK(ResultBytes().data() == nullptr);
  CHECK(ResultBytes(nullptr, 0).data() == nullptr);
}

TEST_CASE("bytes of a result can be used as a vector is, and become one") {
  const auto values = numbers(10);
  ResultBytes bytes = values;
  const std::vector<std::byte> back = bytes;
  CHECK(back == values);
  CHECK(bytes == values);
  CHECK(std::span<const std::byte>(bytes).size() == 10);
  CHECK(std::vector<std::byte>(bytes.begin(), bytes.end()) == values);
  bytes.resize(12);
  CHECK(bytes[9] == values[9]);
  CHECK(bytes[11] == std::byte{0});
  bytes.resize(2);
  CHECK(bytes == numbers(2));
  bytes = ResultBytes();
  CHECK(std::vector<std::byte>(bytes).empty());
  bytes.resize(1);
  CHECK(bytes == std::vector<std::byte>(1));
}

}  // namespace hvd::test
