// Which gradients travel together: one answer for the same question, every member in one bucket, no
// bucket of two kinds or too large.
#include "torch_bindings/gradients/bucket_layout.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "tests/support/error_of.h"

namespace {

using hvd::BucketLayout;
using hvd::InvalidArgument;
using hvd::test::error_of;
using Buckets = std::vector<BucketLayout::Bucket>;
using Members = std::vector<BucketLayout::Member>;

Members members_of(const std::vector<std::size_t>& bytes) {
  Members members;
  for (const auto size : bytes)
    members.push_back({.name = "p" + std::to_string(members.size()), .bytes = size});
  return members;
}

TEST_CASE("bucket layout: from the last member on, until a bucket is full") {
  const auto deal = [](const std::vector<std::size_t>& bytes, std::size_t most, std::size_t first) {
    return BucketLayout::deal(members_of(bytes), {.most_bytes = most, .first_bytes = first});
  };
  CHECK(deal({4, 4, 4, 4, 4}, 8, 8) == Buckets{{4, 3}, {2, 1}, {0}});
  CHECK(deal({4, 4, 4, 4, 4}, 12, 4) == Buckets{{4}, {3, 2, 1}, {0}});
  CHECK(deal({100, 1, 1}, 8, 8) == Buckets{{2, 1}, {0}});  // larger than a bucket: by itself
  CHECK(deal({1, 1, 100}, 8, 8) == Buckets{{2}, {1, 0}});
  CHECK(deal({0, 0, 0}, 0, 0) == Buckets{{2, 1, 0}});
  CHECK(deal({1, 1}, 0, 0) == Buckets{{1}, {0}});
  CHECK(deal({}, 8, 8).empty());
}

TEST_CASE(
    "bucket layout: in the order that is given, without those that go alone, and one kind to a "
    "bucket") {
  Members members = members_of({1, 1, 1, 1, 1, 1});
  members[1].kind = members[2].kind = 1;
  members[4].alone = true;
  CHECK(BucketLayout::deal(members, {.most_bytes = 9, .first_bytes = 9}) ==
        Buckets{{5, 3}, {2, 1}, {0}});
  CHECK(BucketLayout::deal(members,
                           {.most_bytes = 9, .first_bytes = 9, .order = {1, 4, 2, 0, 3, 5}}) ==
        Buckets{{1, 2}, {0, 3, 5}});
  for (auto& member : members) member.alone = true;
  CHECK(BucketLayout::deal(members, {.most_bytes = 9, .first_bytes = 9}).empty());
}

TEST_CASE(
    "bucket layout: groups of the user's, by number or by lists, which may be of several kinds") {
  Members members = members_of({1, 1, 1, 1, 1});
  members[1].kind = 1;
  const auto of_groups = [&](int groups) {
    return BucketLayout::deal(members, {.most_bytes = 1, .first_bytes = 1, .groups = groups});
  };
  CHECK(of_groups(2) == Buckets{{0, 2}, {1}, {3, 4}});
  CHECK(of_groups(9) == Buckets{{0}, {1}, {2}, {3}, {4}});
  CHECK(error_of<InvalidArgument>([&] { of_groups(0); }).find("0 is not a number of groups") !=
        std::string::npos);
  const auto of_lists = [&](Buckets lists) {
    return BucketLayout::deal(members, {.most_bytes = 9, .first_bytes = 9, .lists = lists});
  };
  CHECK(of_lists({{3, 1, 3}, {}}) == Buckets{{3}, {1}, {4, 2, 0}});
  const std::string twice = error_of<InvalidArgument>([&] { of_lists({{0, 1}, {2, 1}}); });
  CHECK_MESSAGE(twice.find("'p1' is in two groups") != std::string::npos, twice);
}

TEST_CASE(
    "bucket layout: of any members and terms, each is in one bucket, of one kind, and no larger "
    "than asked") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::size_t end) { return static_cast<std::size_t>(random()) % end; };
    Members members = members_of(std::vector<std::size_t>(below(30)));
    for (auto& member : members) {
      member.bytes = below(40);
      member.kind = static_cast<int>(below(3));
      member.alone = below(5) == 0;
    }
    BucketLayout::Terms terms{.most_bytes = below(100), .first_bytes = below(30)};
    if (below(2) == 0) {
      terms.order.resize(members.size());
      std::iota(terms.order.begin(), terms.order.end(), std::size_t{0});
      std::shuffle(terms.order.begin(), terms.order.end(), random);
    }
    const auto buckets = BucketLayout::deal(members, terms);
    CHECK(buckets == BucketLayout::deal(members, terms));
    std::vector<int> times(members.size());
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      std::size_t bytes = 0;
      for (const auto place : buckets[b]) {
        ++times[place];
        bytes += members[place].bytes;
        CHECK(members[place].kind == members[buckets[b].front()].kind);
      }
      CHECK((buckets[b].size() == 1 || bytes <= (b == 0 ? terms.first_bytes : terms.most_bytes)));
    }
    for (std::size_t i = 0; i < members.size(); ++i) CHECK(times[i] == (members[i].alone ? 0 : 1));
  }
}

}  // namespace
