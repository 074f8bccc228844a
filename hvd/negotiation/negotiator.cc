#include "hvd/negotiation/negotiator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/negotiation/output_rows.h"

namespace hvd {

namespace {

enum class RecordType : std::uint8_t { Introduce, Agree, HostReady, Cut, Evict, Leave, End, Joining, JoinedUp, Conflict, Refuse, Doubt };

void put_bits(Writer& writer, const std::vector<bool>& bits) {
  std::vector<std::uint8_t> packed((bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i)
    if (bits[i]) packed[i / 8] = static_cast<std::uint8_t>(packed[i / 8] | (1U << (i % 8)));
  writer.put(static_cast<std::uint32_t>(bits.size())).put_list(std::span<const std::uint8_t>(packed));
}

std::vector<bool> get_bits(Reader& reader) {
  const auto count = reader.get<std::uint32_t>();
  const auto packed = reader.get_list<std::uint8_t>();
  if (packed.size() != (std::size_t{count} + 7) / 8) throw WireError("bit list of the wrong length");
  std::vector<bool> bits(count);
  for (std::size_t i = 0; i < count; ++i) bits[i] = ((packed[i / 8] >> (i % 8)) & 1U) != 0;
  return bits;
}

std::size_t set_rank(const ProcessSetInfo& set, int rank) {
  const auto place = std::lower_bound(set.ranks.begin(), set.ranks.end(), rank);
  if (place == set.ranks.end() || *place != rank) throw WireError("rank outside its process set");
  return static_cast<std::size_t>(place - set.ranks.begin());
}

}  // namespace

std::string_view unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, std::span<char> text) {
  const auto [end, size] = joins == 0 ? fmt::format_to_n(text.data(), text.size(), "{}.noname.{}\n", name_of(kind), number)
                                      : fmt::format_to_n(text.data(), text.size(), "{}.noname.{}.{}\n", name_of(kind), joins, number);
  return {text.data(), static_cast<std::size_t>(end - text.data())};
}
std::string unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number) {
  std::array<char, kUnnamedText> text{};
  return std::string(unnamed(kind, joins, number, text));
}
bool is_unnamed(const std::string& name) { return !name.empty() && name.back() == '\n'; }
std::string_view display_name(const std::string& name) {
  return std::string_view(name).substr(0, name.size() - (is_unnamed(name) ? 1 : 0));
}

void encode(Writer& writer, const Agreement& agreement) {
  put_bits(writer, agreement.present);
  writer.put_list(std::span<const int>(agreement.absent)).put(agreement.last);
}

Agreement decode_agreement(Reader& reader) {
  Agreement agreement;
  agreement.present = get_bits(reader);
  agreement.absent = reader.get_list<int>();
  agreement.last = reader.get<int>();
  return agreement;
}

Negotiator::Negotiator(const Topology& topology, std::vector<ProcessSetInfo> sets, std::uint64_t fusion_threshold_bytes,
                       std::uint32_t slots, bool groups_alone)
    : topology_(topology),
      fusion_threshold_bytes_(fusion_threshold_bytes),
      groups_alone_(groups_alone),
      slot_capacity_(slots),
      left_(static_cast<std::size_t>(topology.size)) {
  for (auto& set : sets) add_process_set(std::move(set));
  free_slots_[0] = slots;
}

void Negotiator::add_process_set(ProcessSetInfo set) {
  const auto here = std::count_if(set.ranks.begin(), set.ranks.end(),
                                  [&](int rank) { return topology_.domain_of_rank[static_cast<std::size_t>(rank)] == topology_.domain; });
  const std::lock_guard lock(sets_mutex_);
  sets_.push_back({std::move(set), static_cast<std::uint32_t>(here), {}, -1, false});
}

const Negotiator::Set& Negotiator::set(int id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= sets_.size()) throw WireError("unknown process set");
  return sets_[static_cast<std::size_t>(id)];
}
bool Negotiator::has_process_set(int id) const {
  const std::shared_lock lock(sets_mutex_);
  return id >= 0 && static_cast<std::size_t>(id) < sets_.size() && !sets_[static_cast<std::size_t>(id)].removed;
}
const ProcessSetInfo& Negotiator::process_set(int id) const {
  const std::shared_lock lock(sets_mutex_);
  return set(id).info;
}
std::uint32_t Negotiator::local_members(int process_set) const { return set(process_set).local_members; }
const std::vector<int>& Negotiator::joined(int process_set) const { return set(process_set).joined; }
int Negotiator::last_joined(int process_set) const { return set(process_set).last_joined; }
Scope Negotiator::scope_of(int process_set) const {
  return local_members(process_set) == this->process_set(process_set).ranks.size() ? Scope::Domain : Scope::World;
}

std::vector<const Unit*> Negotiator::units_of(int process_set) const {
  std::vector<const Unit*> units;
  for (auto known = ids_.lower_bound(UnitKey{process_set, OpKind{}, {}}); known != ids_.end() && known->first.process_set == process_set;
       ++known)
    units.push_back(&units_.at(known->second));
  return units;
}

std::vector<const Unit*> Negotiator::units_of(int process_set, const std::string& name) const {
  std::vector<const Unit*> units;
  for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
    if (const Unit* unit = find({process_set, static_cast<OpKind>(kind), name})) units.push_back(unit);
  return units;
}

bool Negotiator::has_agreed(Scope scope) const {
  return std::any_of(queues_.begin(), queues_.end(), [&](const auto& queue) { return scope_of(queue.first) == scope; });
}

std::vector<int> Negotiator::sets_with_agreed(Scope scope) const {
  std::vector<int> sets;
  for (const auto& [set, queue] : queues_)
    if (scope_of(set) == scope) sets.push_back(set);
  return sets;
}

bool Negotiator::takes_part_next(int process_set) const {
  return local_participants(process_set, queues_.at(process_set).front().absent) > 0;
}

std::vector<int> Negotiator::domains_of_next_cut(int process_set) const {
  const auto& absent = queues_.at(process_set).front().absent;
  std::set<int> domains;
  for (const int rank : this->process_set(process_set).ranks)
    if (!std::binary_search(absent.begin(), absent.end(), rank)) domains.insert(topology_.domain_of_rank[static_cast<std::size_t>(rank)]);
  return {domains.begin(), domains.end()};
}

std::size_t Negotiator::batches_of_next_cut(int process_set) const {
  return count_batches(queues_.at(process_set), fusion_threshold_bytes_, groups_alone_);
}

std::uint32_t Negotiator::local_participants(const PlannedBatch& plan) const { return local_participants(plan.process_set, plan.absent); }

std::uint32_t Negotiator::local_participants(int process_set, const std::vector<int>& absent) const {
  const auto here = [&](int rank) { return topology_.domain_of_rank[static_cast<std::size_t>(rank)] == topology_.domain; };
  return local_members(process_set) - static_cast<std::uint32_t>(std::count_if(absent.begin(), absent.end(), here));
}

const Unit* Negotiator::find(const UnitKey& key) const {
  const auto known = ids_.find(key);
  return known == ids_.end() ? nullptr : &units_.at(known->second);
}

bool Negotiator::has_introduced_all(const Unit& unit, const std::vector<int>& absent) const {
  const auto& ranks = process_set(unit.key.process_set).ranks;
  if (unit.introduced == ranks.size()) return true;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (!unit.signatures[i] && !std::binary_search(absent.begin(), absent.end(), ranks[i])) return false;
  return true;
}

bool Negotiator::introduced(const Unit& unit, int rank, const Signature& signature) const {
  const auto& said = unit.signatures[set_rank(process_set(unit.key.process_set), rank)];
  return said && *said == signature;
}

std::optional<std::uint32_t> Negotiator::free_range(std::uint32_t slots) const {
  for (const auto& [first, length] : free_slots_)
    if (length >= slots) return first;
  return std::nullopt;
}

std::optional<Bytes> Negotiator::introduction(const UnitKey& key, int rank, const Signature& signature,
                                              const std::function<std::uint32_t(std::uint32_t)>& generation_of) const {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  if (const auto known = ids_.find(key); known != ids_.end()) {
    id = known->second;
    generation = units_.at(id).generation;
  } else {
    const auto range = free_range(std::max<std::uint32_t>(1, static_cast<std::uint32_t>(signature.tensors.size())));
    if (!range) return std::nullopt;
    id = *range;
    generation = generation_of(id);
  }
  Writer writer;
  writer.put(RecordType::Introduce).put(id).put(generation).put(rank).put(key.process_set).put(key.kind).put_string(key.name);
  encode(writer, signature);
  return writer.take();
}

std::optional<std::uint32_t> Negotiator::oldest(const std::function<bool(std::uint32_t)>& evictable) const {
  const auto found = std::find_if(usage_.begin(), usage_.end(), evictable);
  return found == usage_.end() ? std::nullopt : std::optional(*found);
}

Bytes Negotiator::eviction(std::uint32_t id) { return Writer().put(RecordType::Evict).put(id).take(); }
Bytes Negotiator::cut_record(int process_set, std::span<const std::uint64_t> sequences) {
  return Writer().put(RecordType::Cut).put(process_set).put_list(sequences).take();
}
Bytes Negotiator::leaving(int rank, std::span<const Pledge> pledges) {
  return Writer().put(RecordType::Leave).put(rank).put_list(pledges).take();
}
Bytes Negotiator::refusal(std::uint32_t id, int rank) { return Writer().put(RecordType::Refuse).put(id).put(rank).take(); }
Bytes Negotiator::doubt(std::uint32_t id) { return Writer().put(RecordType::Doubt).put(id).take(); }
Bytes Negotiator::end() { return Writer().put(RecordType::End).take(); }
Bytes Negotiator::conflict(int process_set, std::string_view name, const std::vector<StuckRank>& stuck_ranks) {
  Writer writer;
  writer.put(RecordType::Conflict).put(process_set).put_string(name).put(static_cast<std::uint32_t>(stuck_ranks.size()));
  for (const auto& stuck_rank : stuck_ranks) writer.put(stuck_rank.rank).put(stuck_rank.kind);
  return writer.take();
}
Bytes Negotiator::joining(int process_set, int rank) { return Writer().put(RecordType::Joining).put(process_set).put(rank).take(); }
Bytes Negotiator::joined_up(int process_set, int rank) { return Writer().put(RecordType::JoinedUp).put(process_set).put(rank).take(); }
Bytes Negotiator::agreement(std::uint32_t id, const Agreement& what) {
  Writer writer;
  writer.put(RecordType::Agree).put(id);
  encode(writer, what);
  return writer.take();
}
Bytes Negotiator::host_readiness(std::uint32_t id, const Agreement& what) {
  Writer writer;
  writer.put(RecordType::HostReady).put(id);
  encode(writer, what);
  return writer.take();
}

void Negotiator::apply(std::span<const std::byte> record, std::uint64_t position, Outcomes& outcomes) {
  Reader reader(record);
  switch (static_cast<RecordType>(reader.get<std::uint8_t>())) {
    case RecordType::Introduce:
      return apply_introduction(reader, outcomes);
    case RecordType::Agree:
      return apply_agreement(reader, outcomes);
    case RecordType::HostReady: {
      const auto id = reader.get<std::uint32_t>();
      known_unit(id).undecided = true;
      outcomes.host_ready.push_back({id, decode_agreement(reader)});
      return;
    }
    case RecordType::Cut:
      return apply_cut(reader, position, outcomes);
    case RecordType::Evict:
      return forget(reader.get<std::uint32_t>());
    case RecordType::Leave:
      return apply_leaving(reader, outcomes);
    case RecordType::Refuse:
      return apply_refusal(reader, outcomes);
    case RecordType::Doubt: {
      const auto id = reader.get<std::uint32_t>();
      known_unit(id);
      outcomes.doubted.push_back(id);
      return;
    }
    case RecordType::End:
      ended_ = true;
      return;
    case RecordType::Joining: {
      const int id = reader.get<int>();
      const int rank = reader.get<int>();
      known_set(id, rank);
      auto& joined = sets_[static_cast<std::size_t>(id)].joined;
      const auto place = std::lower_bound(joined.begin(), joined.end(), rank);
      if (place != joined.end() && *place == rank) return;
      joined.insert(place, rank);
      sets_[static_cast<std::size_t>(id)].last_joined = rank;
      return;
    }
    case RecordType::Conflict:
      return apply_conflict(reader, outcomes);
    case RecordType::JoinedUp: {
      const int id = reader.get<int>();
      const int rank = reader.get<int>();
      known_set(id, rank);
      outcomes.joined.push_back({id, rank});
      return;
    }
  }
  throw WireError("unknown kind of record");
}

const ProcessSetInfo& Negotiator::known_set(int id, int rank) const {
  if (!has_process_set(id)) throw WireError("unknown process set");
  const auto& set = process_set(id);
  set_rank(set, rank);
  return set;
}

void Negotiator::apply_introduction(Reader& reader, Outcomes& outcomes) {
  const auto id = reader.get<std::uint32_t>();
  const auto generation = reader.get<std::uint32_t>();
  const auto rank = reader.get<int>();
  UnitKey key;
  key.process_set = reader.get<int>();
  key.kind = reader.get<OpKind>();
  key.name = reader.get_string();
  auto signature = std::make_shared<const Signature>(decode_signature(reader));
  const auto& set = known_set(key.process_set, rank);
  if (signature->kind != key.kind || !is_plausible(*signature, set.ranks.size())) throw WireError("an introduction that makes no sense");
  const auto known = ids_.find(key);
  if (known != ids_.end() ? known->second != id : units_.contains(id)) throw WireError("an introduction under the wrong id");

  auto found = units_.find(id);
  if (found == units_.end()) {
    const auto slots = std::max<std::uint32_t>(1, static_cast<std::uint32_t>(signature->tensors.size()));
    auto range = free_slots_.find(id);
    if (range == free_slots_.end() || range->second < slots) throw WireError("introduction of a slot that is not free");
    const auto rest = range->second - slots;
    free_slots_.erase(range);
    if (rest > 0) free_slots_[id + slots] = rest;
    usage_.push_back(id);
    found = units_
                .emplace(
                    id, Unit{id, generation, key, scope_of(key.process_set), slots, {}, 0, false, std::prev(usage_.end()), false, false, 0})
                .first;
    found->second.signatures.resize(set.ranks.size());
    if (!is_unnamed(key.name) && !units_of(key.process_set, key.name).empty()) ambiguous_.insert({key.process_set, key.name});
    ids_[std::move(key)] = id;
  }
  auto& signatures = found->second.signatures;
  // Equal signatures share one value: what n ranks say of a tensor then costs one copy, and comparing them one pointer each.
  for (const auto& other : signatures) {
    if (other && *other == *signature) {
      signature = other;
      break;
    }
  }
  found->second.settled = false;
  auto& place = signatures[set_rank(set, rank)];
  if (!place) ++found->second.introduced;
  place = std::move(signature);
  outcomes.introduced.push_back({id, rank});
}

Status Negotiator::judge(const Unit& unit, const std::vector<int>& absent) const {
  std::vector<int> ranks;
  std::vector<SharedSignature> signatures;
  const auto& all = process_set(unit.key.process_set).ranks;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::binary_search(absent.begin(), absent.end(), all[i])) continue;
    if (!unit.signatures[i]) return {Status::Code::BackendError, "a tensor was agreed before every rank had introduced it"};
    ranks.push_back(all[i]);
    signatures.push_back(unit.signatures[i]);
  }
  if (ranks.empty()) return {Status::Code::BackendError, "a tensor was agreed that no rank has submitted"};
  Status status = verdict(display_name(unit.key.name), ranks, signatures);
  if (!status.ok() || absent.empty()) return status;
  // The values of those who have joined count as zeros; where there is no such value, they are missed.
  if (unit.key.kind == OpKind::Barrier || unit.key.kind == OpKind::Allreduce) return {};
  return {Status::Code::Joined,
          formatted("{} '{}': rank{} {} {} joined and cannot take part", name_of(unit.key.kind), display_name(unit.key.name),
                    absent.size() == 1 ? "" : "s", rank_list(absent), absent.size() == 1 ? "has" : "have")};
}

std::vector<std::int64_t> Negotiator::total_bytes(const Unit& unit, const Signature& first) const {
  std::vector<std::int64_t> bytes;
  const bool gathers = unit.key.kind == OpKind::Allgather || unit.key.kind == OpKind::Alltoall;
  for (std::size_t i = 0; i < first.tensors.size(); ++i) {
    std::int64_t elements = 0;
    if (gathers) {
      for (const auto& signature : unit.signatures) elements += element_count(signature->tensors[i].shape);
    } else {
      elements = element_count(first.tensors[i].shape);
    }
    bytes.push_back(elements * static_cast<std::int64_t>(element_bytes(first.tensors[i].dtype)));
  }
  return bytes;
}

void Negotiator::apply_agreement(Reader& reader, Outcomes& outcomes) {
  const auto id = reader.get<std::uint32_t>();
  Agreement what = decode_agreement(reader);
  Unit& unit = known_unit(id);
  usage_.splice(usage_.end(), usage_, unit.usage);
  if (unit.queued || !has_process_set(unit.key.process_set)) throw WireError("an agreement out of turn");
  for (std::size_t i = 0; i < what.absent.size(); ++i) {
    set_rank(process_set(unit.key.process_set), what.absent[i]);
    if (i > 0 && what.absent[i] <= what.absent[i - 1]) throw WireError("ranks that are not ascending");
  }
  Status status = unit.settled && what.absent.empty() ? Status() : judge(unit, what.absent);
  if (status.ok() && !unit.settled && what.absent.empty())
    status = verdict_on_outputs(display_name(unit.key.name), process_set(unit.key.process_set).ranks,
                                [&](std::size_t place) -> const Signature& { return *unit.signatures[place]; });
  unit.settled = status.ok() && what.absent.empty();
  unit.undecided = false;
  pledged_.consume(unit.key);
  if (status.ok()) {
    // Of the first rank that takes part; those of ranks that have joined may be of another time.
    const auto& ranks = process_set(unit.key.process_set).ranks;
    std::size_t first = 0;
    while (std::binary_search(what.absent.begin(), what.absent.end(), ranks[first])) ++first;
    const SharedSignature signature = unit.signatures[first];
    what.present.resize(signature->tensors.size());
    if (unit.key.kind == OpKind::Control) what.present.assign(what.present.size(), false);
    if (std::find(what.present.begin(), what.present.end(), true) != what.present.end()) {
      unit.undecided = unit.queued = true;
      queues_[unit.key.process_set].push_back(
          {id, unit.key.process_set, signature, what.present, total_bytes(unit, *signature), what.absent});
    }
    if (unit.key.kind == OpKind::Control) apply_control(unit, what, outcomes);
    if (unit.key.kind == OpKind::Join) {
      auto& set = sets_[static_cast<std::size_t>(unit.key.process_set)];
      // Within a domain the log says who came last; whose arrival completed the agreement may be another.
      if (unit.scope == Scope::Domain) what.last = set.last_joined;
      set.joined.clear();
    }
  }
  outcomes.agreed.push_back({id, std::move(status), std::move(what)});
}

void Negotiator::apply_conflict(Reader& reader, Outcomes& outcomes) {
  const int process_set = reader.get<int>();
  const std::string name = reader.get_string();
  if (!has_process_set(process_set)) throw WireError("unknown process set");
  const auto& set = this->process_set(process_set);
  std::vector<int> ranks;
  std::vector<SharedSignature> signatures;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    const int rank = reader.get<int>();
    const auto kind = reader.get<OpKind>();
    if (kind > OpKind::Control) throw WireError("a stuck_rank to an unknown kind of operation");
    const Unit* unit = find({process_set, kind, name});
    const auto signature = unit == nullptr ? nullptr : unit->signatures[set_rank(set, rank)];
    if (!signature) continue;  // forgotten here meanwhile
    ranks.push_back(rank);
    signatures.push_back(signature);
  }
  if (ranks.empty()) throw WireError("a conflict between nobody");
  Outcomes::Voided voided{{}, verdict(display_name(name), ranks, signatures)};
  if (voided.status.ok())
    voided.status = {Status::Code::Mismatch, formatted("'{}': the ranks want different operations", display_name(name))};
  for (const auto& signature : signatures) {
    const std::uint32_t id = find({process_set, signature->kind, name})->id;
    if (units_.at(id).queued) throw WireError("a conflict about what is agreed");
    const UnitRef unit = units_.at(id).ref();
    if (std::find(voided.units.begin(), voided.units.end(), unit) == voided.units.end()) voided.units.push_back(unit);
  }
  for (const auto& unit : voided.units) {
    pledged_.consume(units_.at(unit.id).key);
    forget(unit.id);
  }
  outcomes.voided.push_back(std::move(voided));
}

void Negotiator::apply_leaving(Reader& reader, Outcomes& outcomes) {
  const int rank = reader.get<int>();
  if (rank < 0 || rank >= topology_.size) throw WireError("a rank outside the world has left");
  for (const auto& [id, rounds] : reader.get_list<Pledge>()) {
    const Unit& unit = known_unit(id);
    set_rank(process_set(unit.key.process_set), rank);
    if (rounds == 0) throw WireError("a pledge of nothing");
    outcomes.pledges[unit.key] += rounds;
    if (unit.scope == Scope::Domain) pledged_.add(unit.key, rank, rounds);
  }
  left_[static_cast<std::size_t>(rank)] = any_left_ = true;
  outcomes.left.push_back(rank);
}

void Negotiator::apply_refusal(Reader& reader, Outcomes& outcomes) {
  const auto id = reader.get<std::uint32_t>();
  const int rank = reader.get<int>();
  const Unit& unit = known_unit(id);
  set_rank(process_set(unit.key.process_set), rank);
  if (unit.queued) throw WireError("a refusal of what is agreed");
  const Status status(Status::Code::Shutdown, formatted("{} '{}': rank {} has called hvd::shutdown() without submitting it",
                                                        name_of(unit.key.kind), display_name(unit.key.name), rank));
  const UnitRef ref = unit.ref();
  pledged_.consume(unit.key);
  forget(id);
  outcomes.voided.push_back({{ref}, status});
}

void Negotiator::apply_control(const Unit& unit, Agreement& what, Outcomes& outcomes) {
  const Signature& signature = *unit.signatures.front();
  if (signature.tensors.size() != 1) throw WireError("a control operation without its list of ranks");
  if (unit.key.name == kRemoveProcessSet) {
    what.last = signature.root;
    if (signature.root <= 0 || !has_process_set(signature.root)) return;
    {
      const std::lock_guard lock(sets_mutex_);
      sets_[static_cast<std::size_t>(signature.root)].removed = true;
    }
    for (const Unit* other : units_of(signature.root))
      if (!other->queued) outcomes.dropped.push_back({other->id, other->slots});
    for (const auto& dropped : outcomes.dropped) forget(dropped.id);
    pledged_.forget_set(signature.root);
    return;
  }
  ProcessSetInfo info{static_cast<int>(sets_.size()), {}, -1};
  for (const auto rank : signature.tensors.front().shape) {
    if (rank < 0 || rank >= topology_.size) throw WireError("a process set with a rank outside the world");
    if (!info.ranks.empty() && rank <= info.ranks.back()) throw WireError("a process set whose ranks are not ascending");
    if (rank == topology_.rank) info.rank = static_cast<int>(info.ranks.size());
    info.ranks.push_back(static_cast<int>(rank));
  }
  what.last = info.id;
  if (info.ranks.empty()) throw WireError("a process set without ranks");
  add_process_set(std::move(info));
}

Unit& Negotiator::known_unit(std::uint32_t id) {
  const auto unit = units_.find(id);
  if (unit == units_.end()) throw WireError("a record about an unknown id");
  return unit->second;
}

void Negotiator::apply_cut(Reader& reader, std::uint64_t position, Outcomes& outcomes) {
  const int process_set = reader.get<int>();
  const auto sequences = reader.get_list<std::uint64_t>();
  const auto queue = queues_.find(process_set);
  if (queue == queues_.end()) throw WireError("a cut of nothing");
  const Scope scope = scope_of(process_set);
  auto plans = cut(queue->second, fusion_threshold_bytes_, groups_alone_);
  if (queue->second.empty()) queues_.erase(queue);
  const bool here = local_participants(plans.front()) > 0;
  if (sequences.size() != (here ? plans.size() : 0)) throw WireError("a cut with the wrong number of batches");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    for (const auto& tensor : plans[i].tensors) {
      Unit& unit = units_.at(tensor.unit);
      unit.undecided = unit.queued = false;
      unit.cut_at = position;
    }
    const std::uint64_t order = ++orders_[process_set];
    outcomes.batches.push_back({here ? sequences[i] : 0, order, scope, std::move(plans[i])});
  }
}

void Negotiator::forget(std::uint32_t id) {
  auto found = units_.find(id);
  if (found == units_.end() || found->second.queued) throw WireError("eviction of an unknown id, or of what is not cut");
  const std::uint32_t slots = found->second.slots;
  const UnitKey key = found->second.key;
  usage_.erase(found->second.usage);
  ids_.erase(key);
  if (ambiguous_.contains({key.process_set, key.name}) && units_of(key.process_set, key.name).size() < 2)
    ambiguous_.erase({key.process_set, key.name});
  units_.erase(found);
  auto range = free_slots_.emplace(id, slots).first;
  if (const auto next = std::next(range); next != free_slots_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_slots_.erase(next);
  }
  if (range != free_slots_.begin()) {
    const auto previous = std::prev(range);
    if (previous->first + previous->second == range->first) {
      previous->second += range->second;
      free_slots_.erase(range);
    }
  }
}

bool Negotiator::all_left() const {
  // Across domains only the root knows when nothing more can come.
  return topology_.domains > 1 ? ended_ : every_rank_left();
}
std::vector<int> Negotiator::leavers_of(const Unit& unit) const {
  std::vector<int> leavers;
  if (!any_left_) return leavers;
  const Set& of = set(unit.key.process_set);
  for (const int rank : of.info.ranks) {
    const bool excused = unit.key.kind != OpKind::Join && std::binary_search(of.joined.begin(), of.joined.end(), rank);
    if (left_[static_cast<std::size_t>(rank)] && !excused) leavers.push_back(rank);
  }
  return leavers;
}
bool Negotiator::every_rank_left() const { return std::find(left_.begin(), left_.end(), false) == left_.end(); }

}  // namespace hvd
