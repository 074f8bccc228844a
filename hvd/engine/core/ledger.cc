#include "hvd/engine/core/ledger.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "hvd/base/text.h"

namespace hvd {

namespace {

bool is_unseen_by(const std::shared_ptr<const HandleState>& pending) {
  return pending != nullptr && !pending->waited_for.load(std::memory_order_relaxed);
}

}  // namespace

EntryState advance(EntryState state, EntryEvent event) {
  using S = EntryState;
  using E = EntryEvent;
  if (event == E::Fail && (state == S::Waiting || state == S::Agreed || state == S::InFlight))
    return S::Failed;
  if (state == S::Waiting && event == E::Agree) return S::Agreed;
  if (state == S::Agreed && event == E::Launch) return S::InFlight;
  if (state == S::Agreed && event == E::Finish) return S::Done;
  if (state == S::InFlight && event == E::Finish) return S::Done;
  throw std::logic_error(formatted("ledger: no event {} in state {}", static_cast<int>(event),
                                   static_cast<int>(state)));
}

DuplicateName duplicate(const UnitKey& key) {
  return DuplicateName{formatted(
      "{} '{}' is already in flight on this rank: wait for it before the name is used again",
      name_of(key.kind), display_name(key.name))};
}

Entry& Ledger::admit(std::unique_ptr<Entry>&& entry) {
  const auto [place, fresh] = entries_.try_emplace(entry->key, nullptr);
  if (!fresh) throw duplicate(entry->key);
  place->second = std::move(entry);
  return *place->second;
}

void Ledger::bind(Entry& entry, UnitRef unit) {
  // It may have been bound before, to a unit that was forgotten before this rank arrived.
  if (const auto before = by_unit_.find(entry.unit);
      before != by_unit_.end() && before->second == &entry)
    by_unit_.erase(before);
  entry.unit = unit;
  by_unit_[unit] = &entry;
}

Entry* Ledger::find(UnitRef unit) {
  const auto known = by_unit_.find(unit);
  return known == by_unit_.end() ? nullptr : known->second;
}

Entry* Ledger::find(const UnitKey& key) {
  const auto known = entries_.find(key);
  return known == entries_.end() ? nullptr : known->second.get();
}

std::unique_ptr<Entry> Ledger::remove(Entry& entry) {
  if (const auto known = by_unit_.find(entry.unit);
      known != by_unit_.end() && known->second == &entry)
    by_unit_.erase(known);
  auto node = entries_.extract(entry.key);
  return std::move(node.mapped());
}

Ledger::Place Ledger::take_out(Entry& entry) {
  return {entries_.extract(entry.key), by_unit_.extract(entry.unit)};
}

void Ledger::note_unseen(const UnitKey& key, const std::shared_ptr<HandleState>& pending) noexcept {
  if (!is_unseen_by(pending) || is_unnamed(key.name)) return;
  if (unseen_.size() >= look_through_at_) {
    std::erase_if(unseen_, [](const auto& known) { return !is_unseen_by(known.second.lock()); });
    look_through_at_ = std::max(kFewUnseen, 2 * unseen_.size());
  }
  try {
    unseen_[key] = pending;
  } catch (const std::bad_alloc&) {  // a mistake of its caller is then told later
  }
}

bool Ledger::is_unseen(const UnitKey& key) const {
  const auto known = unseen_.find(key);
  return known != unseen_.end() && is_unseen_by(known->second.lock());
}

bool Ledger::put_back(Place& place) {
  if (place.entry.empty() || place.unit.empty() || by_unit_.contains(place.unit.key()))
    return false;
  auto entry = entries_.insert(std::move(place.entry));
  if (!entry.inserted) {
    place.entry = std::move(entry.node);
    return false;
  }
  by_unit_.insert(std::move(place.unit));
  return true;
}

std::vector<Entry*> Ledger::all() {
  std::vector<Entry*> entries;
  entries.reserve(entries_.size());
  for (auto& [key, entry] : entries_) entries.push_back(entry.get());
  return entries;
}

}  // namespace hvd
