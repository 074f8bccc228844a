/// Which blocked ranks wait for one another, and what a domain says of them.

#include "hvd/negotiation/table/deadlock.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "hvd/negotiation/values/unit_names.h"

namespace hvd::test {
namespace {

UnitKey key_of(const std::string& name, int process_set = 0, OpKind kind = OpKind::Allreduce) {
  return {process_set, kind, name};
}

/// Waits for `waits`, and has submitted `more` besides.
BlockedRank blocked(int rank, const std::vector<UnitKey>& waits,
                    const std::vector<UnitKey>& more = {}) {
  BlockedRank made{rank, waits, {waits.begin(), waits.end()}};
  made.submitted.insert(more.begin(), more.end());
  return made;
}

const std::vector<int> kAll{0, 1, 2}, kPair{1, 2};
const RanksOf kRanksOf = [](int process_set) {
  return process_set == 0 ? &kAll : process_set == 1 ? &kPair : nullptr;
};

std::vector<std::string> ended(std::vector<BlockedRank> ranks) {
  std::vector<std::string> names;
  for (const auto& found : find_deadlock(std::move(ranks), kRanksOf))
    names.push_back(found.key.name + " " + std::to_string(found.missing));
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("deadlock: what each of two ranks waits for, the other lacks, whoever else computes") {
  CHECK(ended({blocked(0, {key_of("a")}), blocked(2, {key_of("b")})}) == Names{"a 2", "b 0"});
  const auto found = find_deadlock(
      {blocked(2, {key_of("b", 1)}), blocked(1, {key_of("a")}), blocked(0, {key_of("b")})},
      kRanksOf);
  REQUIRE(found.size() == 3);
  CHECK(found.front().text.find("rank 0 waits for allreduce 'b'; rank 1 waits for allreduce 'a'; "
                                "rank 2 waits for allreduce 'b' of process set 1. All ranks") !=
        std::string::npos);
}

TEST_CASE(
    "deadlock: not where a rank computes, is ready for what another waits for, or waits for "
    "something else too") {
  CHECK(ended({}).empty());
  // the others compute
  CHECK(ended({blocked(0, {key_of("a")})}).empty());
  CHECK(ended({blocked(1, {key_of("a")}), blocked(2, {key_of("a")})}).empty());  // rank 0 does
  CHECK(ended({blocked(0, {key_of("a")}), blocked(1, {key_of("b")}, {key_of("a")}),
               blocked(2, {key_of("b")}, {key_of("a")})})
            .empty());
  // rank 0 may submit a
  CHECK(
      ended({blocked(1, {key_of("a"), key_of("c")}, {}), blocked(2, {key_of("b")}, {key_of("a")})})
          .empty());
  // A pair that waits for itself, and a rank that waits for one of them.
  CHECK(ended({blocked(0, {key_of("z")}), blocked(1, {key_of("x", 1)}),
               blocked(2, {key_of("y", 1)})}) == Names{"z 1", "x 2", "y 1"});
  // set 7 was removed
  CHECK(ended({blocked(1, {key_of("x", 7)}), blocked(2, {key_of("y", 1)})}).empty());
}

TEST_CASE(
    "deadlock: what ranks have submitted besides ends with it where another one of them has not, "
    "and only there") {
  CHECK(ended({blocked(0, {key_of("b")}), blocked(1, {key_of("a")}, {key_of("a2")}),
               blocked(2, {key_of("a")}, {key_of("a1"), key_of("a2")})}) ==
        Names{"a 0", "b 1", "a1 0", "a2 0"});
  // All of them have, or those that lack it compute.
  CHECK(ended({blocked(0, {key_of("b")}, {key_of("c")}), blocked(1, {key_of("a")}, {key_of("c")}),
               blocked(2, {key_of("a")}, {key_of("c")})}) == Names{"a 0", "b 1"});
  CHECK(ended({blocked(1, {key_of("x", 1)}, {key_of("c")}),
               blocked(2, {key_of("y", 1)}, {key_of("c")})}) == Names{"x 2", "y 1"});
}

TEST_CASE("deadlock: who has joined is waited for no more, but for the join") {
  const UnitKey join = key_of(std::string(kJoin), 0, OpKind::Join);
  CHECK(ended({blocked(0, {join}), blocked(1, {key_of("a")}), blocked(2, {key_of("a")})}).empty());
  CHECK(ended({blocked(0, {join}), blocked(1, {key_of("a")}), blocked(2, {key_of("b")})}) ==
        Names{"a 2", "b 1"});
}

TEST_CASE("deadlock: a report survives its encoding, and a cut one is refused") {
  const BlockedReport report{
      3,
      {blocked(4, {key_of("a")}, {key_of("b", 1)}), blocked(5, {key_of("a")})},
      {{key_of("a"), 17}}};
  Writer writer;
  encode(writer, report);
  const Bytes bytes = writer.take();
  Reader reader(bytes);
  CHECK(decode_blocked_report(reader) == report);
  CHECK(reader.at_end());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const std::span<const std::byte> all(bytes);
    Reader cut(all.first(size));
    CHECK_THROWS_AS(decode_blocked_report(cut), WireError);
  }
}

TEST_CASE("deadlock: what a domain has said holds until something is decided under the name") {
  BlockedDomains domains;
  domains.add({0, {blocked(0, {key_of("a")})}, {{key_of("a"), 5}}});
  domains.add({1, {blocked(2, {key_of("b")})}, {{key_of("b"), 6}}});
  std::uint64_t last_of_b = 6;
  const auto last = [&](const UnitKey& key) { return key.name == "a" ? 5 : last_of_b; };
  CHECK(domains.find(kRanksOf, last).size() == 2);
  domains.add(
      {1, {blocked(2, {key_of("b")}, {key_of("c")})}, {{key_of("b"), 6}, {key_of("c"), 6}}});
  CHECK(domains.find(kRanksOf, last).size() == 3);
  // decided since
  domains.add(
      {1, {blocked(2, {key_of("b")}, {key_of("c")})}, {{key_of("b"), 6}, {key_of("c"), 5}}});
  CHECK(domains.find(kRanksOf, last).size() == 2);
  last_of_b = 7;
  CHECK(domains.find(kRanksOf, last).empty());
  last_of_b = 6;
  domains.add({1, {}, {}});
  CHECK(domains.find(kRanksOf, last).empty());
  CHECK_FALSE(domains.note_said({0, {}, {}}));
  CHECK(domains.note_said({0, {blocked(0, {key_of("a")})}, {}}));
  CHECK_FALSE(domains.note_said({0, {blocked(0, {key_of("a")})}, {}}));
  CHECK(domains.note_said({0, {}, {}}));
}

}  // namespace hvd::test
