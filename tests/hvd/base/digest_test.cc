#include "hvd/base/digest.h"

#include <doctest/doctest.h>

#include <array>
#include <set>
#include <string>
#include <vector>

namespace hvd::test {
namespace {

TEST_CASE("digest: the values that the specification of XXH64 gives") {
  CHECK(digest_of("") == 0xef46db3751d8e999);
  CHECK(digest_of("a") == 0xd24ec4f1a98c6e5b);
  CHECK(digest_of("abc") == 0x44bc2cf5ad770999);
  CHECK(digest_of("Nobody inspects the spammish repetition") == 0xfbcea83c8a378bf1);
}

TEST_CASE("digest: every bit counts, at every length and place; so do two sign bits at once") {
  for (std::size_t length = 1; length <= 100; ++length) {
    std::vector<unsigned char> bytes(length);
    for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<unsigned char>(i * 37);
    const auto before = digest_of_memory(bytes.data(), length);
    std::set<std::uint64_t> seen{before};
    for (std::size_t bit = 0; bit < 8 * length; ++bit) {
      bytes[bit / 8] ^= 1U << bit % 8;
      seen.insert(digest_of_memory(bytes.data(), length));
      bytes[bit / 8] ^= 1U << bit % 8;
    }
    CHECK(seen.size() == 8 * length + 1);
    CHECK(digest_of_memory(bytes.data(), length) == before);
  }
  std::array<double, 64> values{};
  std::set<std::uint64_t> seen;
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      values[i] = values[j] = -0.0;
      seen.insert(digest_of_memory(values.data(), sizeof values));
      values[i] = values[j] = 0.0;
    }
  }
  CHECK(seen.size() == 64 * 63 / 2);
}

TEST_CASE("digest: what comes before counts, and so does where two texts meet") {
  CHECK(digest_of("b", digest_of("a")) != digest_of("a", digest_of("b")));
  CHECK(digest_of("bc", digest_of("a")) != digest_of("c", digest_of("ab")));
  CHECK(digest_of("", 1) != digest_of("", 2));
  CHECK(digest_of(std::string(1, '\0')) != digest_of(""));
}

}  // namespace
}  // namespace hvd::test
