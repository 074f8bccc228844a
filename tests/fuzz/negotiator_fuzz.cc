// Negotiator::apply: several records one after the other, on a small table of a domain with three
// of five ranks.

#include "tests/fuzz/fuzz_examples.h"
#include "tests/fuzz/fuzz_support.h"

namespace hvd::fuzz {

namespace {

Negotiator table() {
  Topology topology;
  topology.size = 5;
  topology.local_size = 3;
  topology.domains = 2;
  topology.domain_of_rank = {0, 0, 0, 1, 1};
  topology.domain_ranks = {0, 1, 2};
  return Negotiator(topology, {{0, {0, 1, 2, 3, 4}, 0}, {1, {0, 2}, 0}, {2, {1, 3, 4}, -1}}, 4096,
                    16);
}

}  // namespace

Bytes example(test::Random& random) {
  Negotiator scratch = table();
  std::uint64_t position = 0;
  Writer writer;
  const auto commit = [&](const Bytes& record) {
    Outcomes outcomes;
    position += record.size();
    scratch.apply(record, position, outcomes);
    writer.put_bytes(record);
  };
  try {
    for (int i = random.between(1, 6); i > 0; --i) {
      const UnitKey wanted = key(random, 3);
      if (!scratch.sets().has(wanted.process_set)) continue;
      const auto ranks = scratch.sets().info(wanted.process_set).ranks;
      Signature said = signature(random, wanted.kind, ranks.size());
      if (wanted.name == kRemoveProcessSet) said.root = random.between(1, 2);
      if (random.one_in(2)) {  // all at once, where they follow one another
        Runs runs;
        for (const int rank : ranks) add(runs, {rank, 1});
        if (const auto record =
                scratch.introduction(wanted, runs, said, [](std::uint32_t) { return 0U; }))
          commit(*record);
      }
      for (const int rank : ranks) {
        if (random.one_in(8)) said.op = ReduceOp::Min;
        if (const auto record =
                scratch.introduction(wanted, rank, said, [](std::uint32_t) { return 0U; }))
          commit(*record);
      }
      const Unit* unit = scratch.find(wanted);
      if (unit == nullptr) continue;
      const std::uint32_t id = unit->id;  // the unit may be evicted in between
      Agreement what;
      what.present.assign(said.tensors.size(), true);
      if (random.one_in(4)) commit(Negotiator::joining(wanted.process_set, ranks[0]));
      if (random.one_in(4)) what.absent.push_back(ranks[0]);
      if (random.one_in(3)) commit(Negotiator::host_readiness(id, what));
      commit(Negotiator::agreement(id, what));
      if (random.one_in(2) && scratch.agreed().has(wanted.process_set)) {
        const bool here = scratch.agreed().takes_part_next(wanted.process_set) != random.one_in(16);
        const std::vector<std::uint64_t> sequences(
            here ? scratch.agreed().batches_of_next_cut(wanted.process_set) : 0, 5);
        commit(Negotiator::cut_record(wanted.process_set, sequences));
      }
      if (random.one_in(4)) commit(Negotiator::eviction(id));
      if (random.one_in(4)) commit(Negotiator::joined_up(wanted.process_set, ranks[0]));
      if (random.one_in(8))
        commit(Negotiator::conflict(wanted.process_set, wanted.name, {{ranks[0], wanted.kind}}));
      if (random.one_in(8)) commit(Negotiator::leaving(ranks[0]));
      if (random.one_in(8)) commit(Negotiator::leaving(ranks[0], std::vector<Pledge>{{id, 2}}));
      if (random.one_in(8)) commit(Negotiator::lingering(1));
      if (random.one_in(8)) commit(Negotiator::doubt(id));
      if (random.one_in(8)) commit(Negotiator::refusal(id, ranks[0]));
    }
  } catch (const WireError&) {  // as good an example as any
  }
  return writer.take();
}

void take(Reader& input) {
  Negotiator negotiator = table();
  std::uint64_t position = 0;
  for (int records = 0; !input.at_end() && records < 200; ++records) {
    const Bytes record = input.get_bytes();
    position += record.size() + 4;
    Outcomes outcomes;
    try {
      negotiator.apply(record, position, outcomes);
    } catch (const WireError&) {
      return;  // the world ends
    }
    for (const auto& agreed : outcomes.agreed)
      if (!negotiator.knows(agreed.id)) std::abort();
    for (const auto& ready : outcomes.host_ready)
      if (!negotiator.knows(ready.id)) std::abort();
    for (const auto& batch : outcomes.batches)
      if (batch.plan.tensors.empty() || negotiator.agreed().local_participants(batch.plan) > 3)
        std::abort();
    for (const Scope scope : {Scope::Domain, Scope::World})
      for (const int set : negotiator.agreed().sets(scope))
        if (negotiator.agreed().batches_of_next_cut(set) == 0 ||
            negotiator.agreed().domains_of_next_cut(set).empty())
          std::abort();
  }
}

}  // namespace hvd::fuzz
