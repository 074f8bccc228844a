#include "tests/scale/table.h"

#include <numeric>
#include <stdexcept>
#include <utility>

#include "tests/scale/simulation.h"

namespace scale {

namespace {

constexpr std::uint32_t kSlots = 4096;

hvd::Topology topology_of(const World& world, int host) {
  hvd::Topology topology;
  topology.size = world.ranks;
  topology.domains = topology.cross_size = world.hosts();
  topology.domain = topology.cross_rank = host;
  topology.domain_of_rank.resize(static_cast<std::size_t>(world.ranks));
  topology.domain_ranks.clear();
  for (int rank = 0; rank < world.ranks; ++rank) {
    topology.domain_of_rank[static_cast<std::size_t>(rank)] = world.host_of(rank);
    if (world.host_of(rank) == host) topology.domain_ranks.push_back(rank);
  }
  topology.rank = topology.domain_ranks.front();
  topology.local_size = static_cast<int>(topology.domain_ranks.size());
  return topology;
}

std::vector<hvd::ProcessSetInfo> everyone(const World& world, int host) {
  std::vector<int> ranks(static_cast<std::size_t>(world.ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {{0, std::move(ranks), host * world.ranks_per_host}};
}

}  // namespace

Table::Table(const World& world, const Program& program, int host)
    : negotiator_(topology_of(world, host), everyone(world, host), world.fusion_threshold_bytes,
                  kSlots),
      introduced_(program.units.size(), std::vector<bool>(static_cast<std::size_t>(world.ranks))) {}

hvd::Outcomes Table::apply(const hvd::Bytes& record) {
  hvd::Outcomes outcomes;
  position_ += record.size();
  negotiator_.apply(record, position_, outcomes);
  return outcomes;
}

Time Table::introduce(const Unit& unit, std::size_t index, int rank) {
  auto known = introduced_[index][static_cast<std::size_t>(rank)];
  if (!known) {
    known = true;
    const Time before = processor_time();
    const auto record =
        negotiator_.introduction(unit.key, rank, *unit.signature, [](std::uint32_t) { return 0U; });
    if (!record) throw std::logic_error("the table is full");
    apply(*record);
    introducing_ += processor_time() - before;
    ++introductions_;
  }
  return introduction_took();
}

Table::Ready Table::ready(const Unit& unit, int last_rank) {
  const Time before = processor_time();
  const hvd::Unit* known = negotiator_.find(unit.key);
  if (known == nullptr) throw std::logic_error("ready for what nobody has introduced");
  const hvd::Agreement what{std::vector<bool>(known->slots, true), {}, last_rank};
  auto outcomes = apply(hvd::Negotiator::host_readiness(known->id, what));
  return {std::move(outcomes.host_ready.front().what), processor_time() - before};
}

const Table::Decision& Table::decide(std::size_t place, hvd::Bytes record) {
  if (place < decided_.size()) {
    if (decided_[place].record != record)
      throw std::logic_error("two hosts have been told different things");
    return decided_[place];
  }
  if (place > decided_.size()) throw std::logic_error("a decision was left out");
  const Time before = processor_time();
  auto outcomes = apply(record);
  for (const auto& agreed : outcomes.agreed)
    if (!agreed.verdict.ok()) throw std::logic_error(agreed.verdict.text());
  decided_.push_back({std::move(record), std::move(outcomes.batches), processor_time() - before});
  return decided_.back();
}

const Table::Decision& Table::decide_cut(std::size_t place) {
  if (place < decided_.size()) {
    if (decided_[place].batches.empty())
      throw std::logic_error("two hosts have been told different things");
    return decided_[place];
  }
  const std::vector<std::uint64_t> sequences(negotiator_.agreed().batches_of_next_cut(0), 1);
  return decide(place, hvd::Negotiator::cut_record(0, sequences));
}

}  // namespace scale
