/// The table that is kept by records.
#include <doctest/doctest.h>

#include <vector>

#include "hvd/negotiation/table/negotiator.h"
#include "tests/support/signatures.h"

namespace hvd::test {

TEST_CASE("two tables that read the same records are equal, and ids are used again") {
  const Topology topology = Topology::single_domain(0, 2);
  Negotiator writer(topology, {{0, {0, 1}, 0}}, 1 << 20, 8);
  Negotiator reader(topology, {{0, {0, 1}, 0}}, 1 << 20, 8);
  std::uint64_t position = 0;
  const auto say = [&](const Bytes& record) {
    position += record.size();
    Outcomes mine;
    Outcomes theirs;
    writer.apply(record, position, mine);
    reader.apply(record, position, theirs);
    CHECK(mine.batches.size() == theirs.batches.size());
    return mine;
  };
  const auto no_generation = [](std::uint32_t) { return 0U; };
  const UnitKey key{0, OpKind::Allreduce, "a"};
  const Signature signature = signature_of(DataType::Float32, {5});
  say(*writer.introduction(key, 0, signature, no_generation));
  say(*writer.introduction(key, 1, signature, no_generation));
  REQUIRE(reader.find(key) != nullptr);
  const auto id = reader.find(key)->id;
  CHECK(writer.find(key)->id == id);
  CHECK(reader.introduced(*reader.find(key), 1, signature));

  const auto agreed = say(Negotiator::agreement(id, {{true}, {}, -1}));
  REQUIRE(agreed.agreed.size() == 1);
  CHECK(agreed.agreed[0].verdict.ok());
  CHECK(reader.agreed().has(Scope::Domain));
  CHECK(reader.agreed().sets(Scope::Domain) == std::vector<int>{0});
  REQUIRE(reader.agreed().batches_of_next_cut(0) == 1);
  const auto batches = say(Negotiator::cut_record(0, std::vector<std::uint64_t>{77})).batches;
  REQUIRE(batches.size() == 1);
  CHECK(batches[0].sequence == 77);
  CHECK(batches[0].order == 1);
  CHECK_FALSE(reader.agreed().has(Scope::Domain));
  CHECK_FALSE(reader.agreed().has(0));

  // Eight slots: a group of seven does not fit beside 'a', but after it is forgotten.
  Signature group = signature;
  for (int i = 0; i < 7; ++i) group.tensors.push_back({DataType::Float32, {5}});
  CHECK_FALSE(
      writer.introduction({0, OpKind::Allreduce, "group"}, 0, group, no_generation).has_value());
  CHECK(writer.oldest([](std::uint32_t) { return true; }) == id);
  say(Negotiator::eviction(id));
  CHECK(reader.find(key) == nullptr);
  say(*writer.introduction({0, OpKind::Allreduce, "group"}, 0, group, no_generation));
  CHECK(reader.find({0, OpKind::Allreduce, "group"})->slots == 8);
  CHECK_FALSE(reader.has_free_slots(1));
}

TEST_CASE("all have left once nobody of them has messages pending") {
  Negotiator table(Topology::single_domain(0, 2), {{0, {0, 1}, 0}}, 1 << 20, 8);
  const auto say = [&](const Bytes& record) {
    Outcomes outcomes;
    table.apply(record, 0, outcomes);
    return outcomes.lingering;
  };
  CHECK(say(Negotiator::lingering(1)) == 1);
  for (const int rank : {0, 1}) CHECK(say(Negotiator::leaving(rank)) == 0);
  CHECK_FALSE(table.all_left());
  CHECK(say(Negotiator::lingering(-1)) == -1);
  CHECK(table.all_left());
  for (const int change : {-1, 0, 2})
    CHECK_THROWS_AS(say(Negotiator::lingering(change)), WireError);
}

TEST_CASE("records that make no sense are refused") {
  Negotiator table(Topology::single_domain(0, 2), {{0, {0, 1}, 0}}, 1 << 20, 8);
  Outcomes outcomes;
  CHECK_THROWS_AS(table.apply({}, 0, outcomes), WireError);
  CHECK_THROWS_AS(table.apply(Bytes(3, std::byte{77}), 0, outcomes), WireError);
  CHECK_THROWS(table.apply(Negotiator::agreement(5, {{true}, {}, -1}), 0, outcomes));
  CHECK_THROWS_AS(table.apply(Negotiator::eviction(5), 0, outcomes), WireError);
}

}  // namespace hvd::test
