#include "hvd/negotiator.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace hvd {

namespace {

enum class RecordType : std::uint8_t { Introduce, Agree, HostReady, Cut, Evict, Leave };

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

std::string unnamed(OpKind kind, std::uint64_t number) { return fmt::format("{}.noname.{}\n", name_of(kind), number); }
bool is_unnamed(const std::string& name) { return !name.empty() && name.back() == '\n'; }
std::string_view display_name(const std::string& name) {
  return std::string_view(name).substr(0, name.size() - (is_unnamed(name) ? 1 : 0));
}

Negotiator::Negotiator(const Topology& topology, std::vector<ProcessSetInfo> sets, std::uint64_t fusion_threshold_bytes,
                       std::uint32_t slots)
    : topology_(topology),
      sets_(std::move(sets)),
      fusion_threshold_bytes_(fusion_threshold_bytes),
      slot_capacity_(slots),
      left_(static_cast<std::size_t>(topology.size)) {
  for (const auto& set : sets_) {
    const auto here = std::count_if(set.ranks.begin(), set.ranks.end(),
                                    [&](int rank) { return topology_.domain_of_rank[static_cast<std::size_t>(rank)] == topology_.domain; });
    local_members_.push_back(static_cast<std::uint32_t>(here));
  }
  free_slots_[0] = slots;
}

bool Negotiator::has_process_set(int id) const { return id >= 0 && static_cast<std::size_t>(id) < sets_.size(); }
const ProcessSetInfo& Negotiator::process_set(int id) const { return sets_.at(static_cast<std::size_t>(id)); }
std::uint32_t Negotiator::local_members(int process_set) const { return local_members_.at(static_cast<std::size_t>(process_set)); }
Scope Negotiator::scope_of(int process_set) const {
  return local_members(process_set) == this->process_set(process_set).ranks.size() ? Scope::Domain : Scope::World;
}

const Unit* Negotiator::find(const UnitKey& key) const {
  const auto known = ids_.find(key);
  return known == ids_.end() ? nullptr : &units_.at(known->second);
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
Bytes Negotiator::cut_record(Scope scope) { return Writer().put(RecordType::Cut).put(scope).take(); }
Bytes Negotiator::leaving(int rank) { return Writer().put(RecordType::Leave).put(rank).take(); }
Bytes Negotiator::agreement(std::uint32_t id, const std::vector<bool>& present) {
  Writer writer;
  writer.put(RecordType::Agree).put(id);
  put_bits(writer, present);
  return writer.take();
}
Bytes Negotiator::host_readiness(std::uint32_t id, const std::vector<bool>& present) {
  Writer writer;
  writer.put(RecordType::HostReady).put(id);
  put_bits(writer, present);
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
      units_.at(id).undecided = true;
      outcomes.host_ready.push_back({id, get_bits(reader)});
      return;
    }
    case RecordType::Cut:
      return apply_cut(reader.get<Scope>(), position, outcomes);
    case RecordType::Evict:
      return forget(reader.get<std::uint32_t>());
    case RecordType::Leave: {
      const int rank = reader.get<int>();
      left_.at(static_cast<std::size_t>(rank)) = true;
      outcomes.left.push_back(rank);
      return;
    }
  }
  throw WireError("unknown kind of record");
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
  if (!has_process_set(key.process_set)) throw WireError("unknown process set");
  const auto& set = process_set(key.process_set);

  auto found = units_.find(id);
  if (found == units_.end()) {
    const auto slots = std::max<std::uint32_t>(1, static_cast<std::uint32_t>(signature->tensors.size()));
    auto range = free_slots_.find(id);
    if (range == free_slots_.end() || range->second < slots) throw WireError("introduction of a slot that is not free");
    const auto rest = range->second - slots;
    free_slots_.erase(range);
    if (rest > 0) free_slots_[id + slots] = rest;
    usage_.push_back(id);
    found = units_.emplace(id, Unit{id, generation, key, scope_of(key.process_set), slots, {}, std::prev(usage_.end()), false, 0}).first;
    found->second.signatures.resize(set.ranks.size());
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
  signatures[set_rank(set, rank)] = std::move(signature);
  outcomes.introduced.push_back({id, rank});
}

Status Negotiator::judge(const Unit& unit) const {
  const auto& set = process_set(unit.key.process_set);
  if (std::find(unit.signatures.begin(), unit.signatures.end(), nullptr) != unit.signatures.end())
    return {Status::Code::BackendError, "a tensor was agreed before every rank had introduced it"};
  return verdict(display_name(unit.key.name), set.ranks, unit.signatures);
}

std::vector<std::int64_t> Negotiator::total_bytes(const Unit& unit) const {
  std::vector<std::int64_t> bytes;
  const Signature& first = *unit.signatures.front();
  for (std::size_t i = 0; i < first.tensors.size(); ++i) {
    std::int64_t elements = 0;
    if (unit.key.kind == OpKind::Allgather) {
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
  auto present = get_bits(reader);
  Unit& unit = units_.at(id);
  usage_.splice(usage_.end(), usage_, unit.usage);
  Status status = judge(unit);
  if (status.ok()) present.resize(unit.signatures.front()->tensors.size());
  unit.undecided = status.ok() && std::find(present.begin(), present.end(), true) != present.end();
  if (unit.undecided) {
    queues_[static_cast<std::size_t>(unit.scope)].push_back(
        {id, unit.key.process_set, unit.signatures.front(), present, total_bytes(unit)});
  }
  outcomes.agreed.push_back({id, std::move(status), std::move(present)});
}

void Negotiator::apply_cut(Scope scope, std::uint64_t position, Outcomes& outcomes) {
  auto batches = number(cut(queues_[static_cast<std::size_t>(scope)], fusion_threshold_bytes_), scope);
  sequence_ += batches.size();
  orders_[static_cast<std::size_t>(scope)] += batches.size();
  for (auto& batch : batches) {
    for (const auto& tensor : batch.plan.tensors) {
      units_.at(tensor.unit).undecided = false;
      units_.at(tensor.unit).cut_at = position;
    }
    outcomes.batches.push_back(std::move(batch));
  }
}

void Negotiator::forget(std::uint32_t id) {
  auto found = units_.find(id);
  if (found == units_.end()) throw WireError("eviction of an unknown id");
  const std::uint32_t slots = found->second.slots;
  usage_.erase(found->second.usage);
  ids_.erase(found->second.key);
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

std::vector<CutBatch> Negotiator::number(std::vector<PlannedBatch> plans, Scope scope) const {
  std::vector<CutBatch> batches;
  std::uint64_t sequence = sequence_;
  std::uint64_t order = orders_[static_cast<std::size_t>(scope)];
  for (auto& plan : plans) batches.push_back({++sequence, ++order, scope, std::move(plan)});
  return batches;
}

bool Negotiator::all_left() const { return std::find(left_.begin(), left_.end(), false) == left_.end(); }

}  // namespace hvd
