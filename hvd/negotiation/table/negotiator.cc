#include "hvd/negotiation/table/negotiator.h"

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/departure.h"

namespace hvd {

Negotiator::Negotiator(const Topology& topology, std::vector<ProcessSetInfo> sets,
                       std::uint64_t fusion_threshold_bytes, std::uint32_t slots, bool groups_alone,
                       std::string world)
    : topology_(topology),
      world_(std::move(world)),
      sets_(topology_, std::move(sets)),
      agreed_(topology_, sets_, fusion_threshold_bytes, groups_alone),
      free_slots_(slots) {}

void Negotiator::bury_removed(const std::function<bool(int)>& in_use) {
  sets_.bury([&](int id) {
    const auto unit = ids_.lower_bound(UnitKey{id, OpKind{}, {}});
    const bool has_units = unit != ids_.end() && unit->first.process_set == id;
    return has_units || in_use(id);
  });
}

std::vector<const Unit*> Negotiator::units_of(int process_set) const {
  std::vector<const Unit*> units;
  for (auto known = ids_.lower_bound(UnitKey{process_set, OpKind{}, {}});
       known != ids_.end() && known->first.process_set == process_set; ++known)
    units.push_back(&units_.at(known->second));
  return units;
}

std::vector<const Unit*> Negotiator::units_of(int process_set, const std::string& name) const {
  std::vector<const Unit*> units;
  for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
    if (const Unit* unit = find({process_set, static_cast<OpKind>(kind), name}))
      units.push_back(unit);
  return units;
}

const Unit* Negotiator::removal_of(int process_set) const {
  const Unit* const unit =
      process_set == 0 ? nullptr : find({0, OpKind::Control, std::string(kRemoveProcessSet)});
  if (unit == nullptr) return nullptr;
  const auto& said = unit->signatures.said();
  const auto is_this = [&](const auto& each) { return each.signature->root == process_set; };
  return std::any_of(said.begin(), said.end(), is_this) ? unit : nullptr;
}

const Unit* Negotiator::find(const UnitKey& key) const {
  const auto known = ids_.find(key);
  return known == ids_.end() ? nullptr : &units_.at(known->second);
}

bool Negotiator::has_introduced_all(const Unit& unit, const std::vector<int>& absent) const {
  const auto& ranks = sets_.info(unit.key.process_set).ranks;
  if (unit.signatures.count() == ranks.size()) return true;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (!unit.signatures.of(i) && !std::binary_search(absent.begin(), absent.end(), ranks[i]))
      return false;
  return true;
}

bool Negotiator::introduced(const Unit& unit, const Runs& ranks, const Signature& signature) const {
  const auto& set = sets_.info(unit.key.process_set);
  return std::all_of(ranks.begin(), ranks.end(), [&](Run run) {
    return unit.signatures.all_equal(places_in(set, run), signature);
  });
}

std::optional<Bytes> Negotiator::introduction(
    const UnitKey& key, const Runs& ranks, const Signature& signature,
    const std::function<std::uint32_t(std::uint32_t)>& generation_of) const {
  std::uint32_t id = 0;
  std::uint32_t generation = 0;
  if (const auto known = ids_.find(key); known != ids_.end()) {
    id = known->second;
    generation = units_.at(id).generation;
  } else {
    const auto range = free_slots_.find(
        std::max<std::uint32_t>(1, static_cast<std::uint32_t>(signature.tensors.size())));
    if (!range) return std::nullopt;
    id = *range;
    generation = generation_of(id);
  }
  return Records::introduction(id, generation, ranks, key, signature);
}

std::optional<std::uint32_t> Negotiator::oldest(
    const std::function<bool(std::uint32_t)>& evictable) const {
  const auto found = std::find_if(usage_.begin(), usage_.end(), evictable);
  return found == usage_.end() ? std::nullopt : std::optional(*found);
}

void Negotiator::apply(std::span<const std::byte> record, std::uint64_t position,
                       Outcomes& outcomes) {
  Reader reader(record);
  switch (static_cast<RecordType>(reader.get<std::uint8_t>())) {
    case RecordType::Introduce: return apply_introduction(reader, outcomes);
    case RecordType::Agree: return apply_agreement(reader, position, outcomes);
    case RecordType::HostReady: {
      const auto id = reader.get<std::uint32_t>();
      known_unit(id).undecided = true;
      outcomes.host_ready.push_back({id, decode_agreement(reader)});
      return;
    }
    case RecordType::Cut: return apply_cut(reader, position, outcomes);
    case RecordType::Evict: return forget(reader.get<std::uint32_t>());
    case RecordType::Leave: return apply_leaving(reader, outcomes);
    case RecordType::Refuse: return apply_refusal(reader, outcomes);
    case RecordType::Doubt: {
      const auto id = reader.get<std::uint32_t>();
      known_unit(id);
      outcomes.doubted.push_back(id);
      return;
    }
    case RecordType::End: ended_ = true; return;
    case RecordType::Joining: {
      const int id = reader.get<int>();
      const int rank = reader.get<int>();
      place_in(known_set(id), rank);
      return sets_.join(id, rank);
    }
    case RecordType::Linger:
      outcomes.lingering = reader.get<int>();
      if (outcomes.lingering != 1 && (outcomes.lingering != -1 || lingering_ == 0))
        throw WireError("ranks with messages that make no sense");
      lingering_ += outcomes.lingering;
      return;
    case RecordType::Conflict: return apply_conflict(reader, outcomes);
    case RecordType::JoinedUp: {
      const int id = reader.get<int>();
      const int rank = reader.get<int>();
      place_in(known_set(id), rank);
      outcomes.joined.push_back({id, rank});
      return;
    }
  }
  throw WireError("unknown kind of record");
}

const ProcessSetInfo& Negotiator::known_set(int id) const {
  if (!sets_.has(id)) throw WireError("unknown process set");
  return sets_.info(id);
}

void Negotiator::apply_introduction(Reader& reader, Outcomes& outcomes) {
  auto [id, generation, ranks, key, signature] = decode_introduction(reader);
  const auto& set = known_set(key.process_set);
  Runs places;
  for (const Run run : ranks) places.push_back(places_in(set, run));
  if (places.empty()) throw WireError("an introduction by nobody");
  if (signature->kind != key.kind || !is_plausible(*signature, set.ranks.size()))
    throw WireError("an introduction that makes no sense");
  const auto known = ids_.find(key);
  if (known != ids_.end() ? known->second != id : units_.contains(id))
    throw WireError("an introduction under the wrong id");

  auto found = units_.find(id);
  if (found == units_.end()) {
    const auto slots =
        std::max<std::uint32_t>(1, static_cast<std::uint32_t>(signature->tensors.size()));
    free_slots_.take(id, slots);
    usage_.push_back(id);
    found = units_
                .emplace(id, Unit{id,
                                  generation,
                                  key,
                                  sets_.scope_of(key.process_set),
                                  slots,
                                  {},
                                  false,
                                  std::prev(usage_.end()),
                                  false,
                                  false,
                                  0})
                .first;
    if (!is_unnamed(key.name) && !units_of(key.process_set, key.name).empty())
      ambiguous_.insert({key.process_set, key.name});
    ids_[std::move(key)] = id;
  }
  found->second.settled = false;
  for (const Run run : places) found->second.signatures.set(run, signature);
  for (const Run run : ranks) outcomes.introduced.push_back({id, run});
}

void Negotiator::apply_agreement(Reader& reader, std::uint64_t position, Outcomes& outcomes) {
  const auto id = reader.get<std::uint32_t>();
  Agreement what = decode_agreement(reader);
  Unit& unit = known_unit(id);
  usage_.splice(usage_.end(), usage_, unit.usage);
  if (unit.queued || !sets_.has(unit.key.process_set)) throw WireError("an agreement out of turn");
  for (std::size_t i = 0; i < what.absent.size(); ++i) {
    place_in(sets_.info(unit.key.process_set), what.absent[i]);
    if (i > 0 && what.absent[i] <= what.absent[i - 1])
      throw WireError("ranks that are not ascending");
  }
  Status status = unit.settled && what.absent.empty()
                      ? Status()
                      : judge(unit, sets_.info(unit.key.process_set), what.absent);
  if (status.ok() && !unit.settled && what.absent.empty())
    status = verdict_on_outputs(
        display_name(unit.key.name), sets_.info(unit.key.process_set).ranks,
        [&](std::size_t place) -> const Signature& { return *unit.signatures.of(place); });
  unit.settled = status.ok() && what.absent.empty();
  unit.undecided = false;
  pledged_.consume(unit.key);
  if (status.ok()) {
    // Of the first rank that takes part; those of ranks that have joined may be of another time.
    const auto& ranks = sets_.info(unit.key.process_set).ranks;
    std::size_t first = 0;
    while (std::binary_search(what.absent.begin(), what.absent.end(), ranks[first])) ++first;
    const SharedSignature signature = unit.signatures.of(first);
    what.present.resize(signature->tensors.size());
    if (unit.key.kind == OpKind::Control) what.present.assign(what.present.size(), false);
    if (std::find(what.present.begin(), what.present.end(), true) != what.present.end()) {
      unit.undecided = unit.queued = true;
      agreed_.add({id, unit.key.process_set, signature, what.present, total_bytes(unit, *signature),
                   what.absent});
    }
    if (unit.key.kind == OpKind::Control) apply_control(unit, what, position, outcomes);
    if (unit.key.kind == OpKind::Join) {
      // Within a domain the log says who came last; another may have completed the agreement.
      if (unit.scope == Scope::Domain) what.last = sets_.last_joined(unit.key.process_set);
      sets_.end_join(unit.key.process_set);
    }
  }
  outcomes.agreed.push_back({id, std::move(status), std::move(what)});
}

void Negotiator::apply_conflict(Reader& reader, Outcomes& outcomes) {
  const int process_set = reader.get<int>();
  const std::string name = reader.get_string();
  const auto& set = known_set(process_set);
  std::vector<int> ranks;
  std::vector<SharedSignature> signatures;
  Outcomes::Voided voided;
  for (const auto& [rank, kind] : decode_stuck_ranks(reader)) {
    const std::size_t place = place_in(set, rank);
    const Unit* unit = find({process_set, kind, name});
    if (unit == nullptr) continue;  // forgotten here meanwhile
    if (unit->queued) throw WireError("a conflict about what is agreed");
    // Whoever has said what of it: its slots are void.
    if (std::find(voided.units.begin(), voided.units.end(), unit->ref()) == voided.units.end())
      voided.units.push_back(unit->ref());
    if (const auto signature = unit->signatures.of(place)) {
      ranks.push_back(rank);
      signatures.push_back(signature);
    }
  }
  if (voided.units.empty()) throw WireError("a conflict about nothing");
  if (!ranks.empty()) voided.status = verdict(display_name(name), ranks, signatures);
  if (voided.status.ok())
    voided.status = {Status::Code::Mismatch,
                     formatted("'{}': the ranks want different operations", display_name(name))};
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
    place_in(sets_.info(unit.key.process_set), rank);
    if (rounds == 0) throw WireError("a reservation of nothing");
    outcomes.pledges[unit.key] += rounds;
    if (unit.scope == Scope::Domain) pledged_.add(unit.key, rank, rounds);
  }
  if (std::find(left_.begin(), left_.end(), rank) != left_.end())
    throw WireError("a rank has left twice");
  left_.push_back(rank);
  if (!world_.empty() && !first_refusal_)
    first_refusal_ =
        Refusal{rank, departure(world_, formatted("rank {} has", rank), "", "").text()};
  outcomes.left.push_back(rank);
}

void Negotiator::apply_refusal(Reader& reader, Outcomes& outcomes) {
  const auto id = reader.get<std::uint32_t>();
  const int rank = reader.get<int>();
  const std::string text = reader.get_string();
  const Unit& unit = known_unit(id);
  place_in(sets_.info(unit.key.process_set), rank);
  if (unit.queued) throw WireError("a refusal of what is agreed");
  if (!text.empty()) {
    const Status deadlock(Status::Code::Deadlock, formatted("{} '{}': {}", name_of(unit.key.kind),
                                                            display_name(unit.key.name), text));
    outcomes.voided.push_back({{unit.ref()}, deadlock});
    pledged_.consume(unit.key);
    return forget(id);
  }
  const Status status = departure(
      world_,
      formatted("{} '{}': rank {} has", name_of(unit.key.kind), display_name(unit.key.name), rank),
      "ended, or called hvd::shutdown(),",
      " without submitting it. If it had fewer batches: ElasticSampler gives all ranks as many, "
      "and join() lets them have different numbers. If it stopped for a reason of its own: all "
      "ranks must agree on that, by hvd::any()");
  if (!first_refusal_) first_refusal_ = Refusal{rank, status.text()};
  const UnitRef ref = unit.ref();
  pledged_.consume(unit.key);
  forget(id);
  outcomes.voided.push_back({{ref}, status});
}

void Negotiator::apply_control(const Unit& unit, Agreement& what, std::uint64_t position,
                               Outcomes& outcomes) {
  const Signature& signature = *unit.signatures.of(0);
  if (signature.tensors.size() != 1)
    throw WireError("a control operation without its list of ranks");
  if (unit.key.name == kRemoveProcessSet) {
    what.last = signature.root;
    if (signature.root <= 0 || !sets_.has(signature.root)) return;
    sets_.remove(signature.root, position);
    // They are forgotten by records of their own, when all ranks have read this one, and the cuts
    // before it, for which they need the slots.
    for (const Unit* other : units_of(signature.root))
      if (!other->queued) outcomes.closed.push_back(other->id);
    pledged_.forget_set(signature.root);
    return;
  }
  std::vector<int> ranks;
  for (const auto rank : signature.tensors.front().shape) {
    if (rank < 0 || rank >= topology_.size)
      throw WireError("a process set with a rank outside the world");
    if (!ranks.empty() && rank <= ranks.back())
      throw WireError("a process set whose ranks are not ascending");
    ranks.push_back(static_cast<int>(rank));
  }
  if (ranks.empty()) throw WireError("a process set without ranks");
  what.last = sets_.add(std::move(ranks));
}

Unit& Negotiator::known_unit(std::uint32_t id) {
  const auto unit = units_.find(id);
  if (unit == units_.end()) throw WireError("a record about an unknown id");
  return unit->second;
}

void Negotiator::apply_cut(Reader& reader, std::uint64_t position, Outcomes& outcomes) {
  const int process_set = reader.get<int>();
  const auto sequences = reader.get_list<std::uint64_t>();
  const Scope scope = sets_.scope_of(process_set);
  auto plans = agreed_.cut_next(process_set);
  const bool here = agreed_.local_participants(plans.front()) > 0;
  if (sequences.size() != (here ? plans.size() : 0))
    throw WireError("a cut with the wrong number of batches");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    for (const auto& tensor : plans[i].tensors) {
      Unit& unit = units_.at(tensor.unit);
      unit.undecided = unit.queued = false;
      unit.cut_at = position;
    }
    const std::uint64_t order = agreed_.next_order(process_set);
    outcomes.batches.push_back({here ? sequences[i] : 0, order, scope, std::move(plans[i])});
  }
}

void Negotiator::forget(std::uint32_t id) {
  auto found = units_.find(id);
  if (found == units_.end() || found->second.queued)
    throw WireError("eviction of an unknown id, or of what is not cut");
  const std::uint32_t slots = found->second.slots;
  const UnitKey key = found->second.key;
  usage_.erase(found->second.usage);
  ids_.erase(key);
  // What a rank waits for stays; what others want instead may have to make room meanwhile.
  if (ambiguous_.contains({key.process_set, key.name}) &&
      units_of(key.process_set, key.name).empty())
    ambiguous_.erase({key.process_set, key.name});
  units_.erase(found);
  free_slots_.give_back(id, slots);
}

bool Negotiator::all_left() const {
  // Across domains only the root knows when nothing more can come.
  return topology_.domains > 1 ? ended_ : have_all_left() && lingering_ == 0;
}

std::vector<int> Negotiator::leavers_of(const UnitKey& key) const {
  std::vector<int> leavers;
  if (!any_left()) return leavers;
  const auto& ranks = sets_.info(key.process_set).ranks;
  const auto& joined = sets_.joined(key.process_set);
  for (const int rank : left_) {
    const bool excused =
        key.kind != OpKind::Join && std::binary_search(joined.begin(), joined.end(), rank);
    if (!excused && std::binary_search(ranks.begin(), ranks.end(), rank)) leavers.push_back(rank);
  }
  return leavers;
}

}  // namespace hvd
