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

TEST_CASE("a conflict ends all that it names, though other ranks have said it here") {
  Negotiator table(Topology::single_domain(0, 3), {{0, {0, 1, 2}, 0}}, 1 << 20, 8);
  Outcomes outcomes;
  const UnitKey sum{0, OpKind::Allreduce, "x"};
  const UnitKey rows{0, OpKind::Allgather, "x"};
  const auto introduce = [&](const UnitKey& key, int rank) {
    const Signature signature = signature_of(DataType::Float32, {5}, key.kind);
    table.apply(*table.introduction(key, rank, signature, [](std::uint32_t) { return 0U; }), 0,
                outcomes);
  };
  introduce(sum, 0);
  introduce(rows, 1);
  const Bytes conflict =
      Negotiator::conflict(0, "x", {{0, sum.kind}, {1, sum.kind}, {2, rows.kind}});
  table.apply(conflict, 0, outcomes);
  REQUIRE(outcomes.voided.size() == 1);
  CHECK(outcomes.voided.front().units.size() == 2);
  CHECK(outcomes.voided.front().status.code() == Status::Code::Mismatch);
  CHECK(table.units_of(0).empty());
  CHECK_THROWS_AS(table.apply(conflict, 0, outcomes), WireError);
}

TEST_CASE("a name stays one of several kinds as long as any of them is known") {
  Negotiator table(Topology::single_domain(0, 2), {{0, {0, 1}, 0}}, 1 << 20, 8);
  Outcomes outcomes;
  for (const OpKind kind : {OpKind::Allreduce, OpKind::Allgather}) {
    CHECK_FALSE(table.is_ambiguous(0, "x"));
    const Signature signature = signature_of(DataType::Float32, {5}, kind);
    const auto record =
        table.introduction({0, kind, "x"}, 0, signature, [](std::uint32_t) { return 0U; });
    table.apply(*record, 0, outcomes);
  }
  for (const OpKind kind : {OpKind::Allgather, OpKind::Allreduce}) {
    CHECK(table.is_ambiguous(0, "x"));
    table.apply(Negotiator::eviction(table.find({0, kind, "x"})->id), 0, outcomes);
  }
  CHECK_FALSE(table.is_ambiguous(0, "x"));
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
