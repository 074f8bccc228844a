#include "hvd/negotiation/leaders/tensor_numbers.h"

#include <utility>

#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

constexpr std::uint64_t kFewRetired = 64;     // fewer at once are not worth the messages
constexpr std::uint64_t kMostRetired = 4096;  // more at once would hold up the leaders

}  // namespace

std::optional<std::uint32_t> TensorNumbers::find(const UnitKey& key) const {
  const auto known = ids_.find(key);
  return known == ids_.end() ? std::nullopt : std::optional(known->second);
}

const UnitKey* TensorNumbers::key_of(std::uint32_t id) const {
  const auto known = known_.find(id);
  return known == known_.end() ? nullptr : &known->second.key;
}

std::vector<UnitKey> TensorNumbers::keys_of_set(int process_set) const {
  const auto first = ids_.lower_bound(UnitKey{process_set, OpKind{}, {}});
  const auto end = ids_.lower_bound(UnitKey{process_set + 1, OpKind{}, {}});
  std::vector<UnitKey> keys;
  for (auto known = first; known != end; ++known) keys.push_back(known->first);
  return keys;
}

const std::vector<Introduction>* TensorNumbers::said_elsewhere(const UnitKey& key) const {
  const auto known = ids_.find(key);
  return known == ids_.end() ? nullptr : &known_.at(known->second).remote;
}

std::uint32_t TensorNumbers::give(const UnitKey& key) {
  const auto [place, fresh] = ids_.try_emplace(key, next_id_);
  const std::uint32_t id = place->second;
  if (!fresh) {
    if (!retiring_.empty()) in_use_.insert(id);  // somebody has met it again
    return id;
  }
  ++next_id_;
  count_kinds(key);
  Known& known = known_[id];
  known.key = key;
  known.usage = usage_.insert(usage_.end(), id);
  return id;
}

void TensorNumbers::learn(const Introduction& introduction) {
  const auto& [id, key, signature, ranks] = introduction;
  if (ids_.try_emplace(key, id).first->second != id) throw WireError("two numbers for one tensor");
  const auto [place, fresh] = known_.try_emplace(id);
  Known& known = place->second;
  if (fresh) {
    known.key = key;
    count_kinds(key);
  }
  if (known.key != key) throw WireError("two tensors with one number");
  // Equal signatures are kept once: n ranks' of a tensor cost little more than one's.
  auto& remote = known.remote;
  auto same = remote.end();
  for (auto other = remote.begin(); other != remote.end(); ++other) {
    if (same == remote.end() && *other->signature == *signature) same = other;
    for (const Run run : ranks) other == same ? add(other->ranks, run) : remove(other->ranks, run);
  }
  if (same == remote.end()) {
    remote.push_back({id, key, signature, {}});
    for (const Run run : ranks) add(remote.back().ranks, run);
  }
  std::erase_if(remote, [](const Introduction& other) { return other.ranks.empty(); });
}

void TensorNumbers::forget(const UnitKey& key) {
  const auto known = ids_.find(key);
  if (known == ids_.end()) return;
  const std::uint32_t id = known->second;
  if (is_root_) usage_.erase(known_.at(id).usage);
  const UnitKey gone = known->first;
  unsure_.erase(gone);
  known_.erase(id);
  ids_.erase(known);
  count_kinds(gone);
}

/// The tensor is new, or has been forgotten.
void TensorNumbers::count_kinds(const UnitKey& key) {
  if (is_unnamed(key.name)) return;
  int kinds = 0;
  for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
    if (ids_.contains({key.process_set, static_cast<OpKind>(kind), key.name})) ++kinds;
  if (kinds > 1) {
    ambiguous_.insert({key.process_set, key.name});
  } else {
    ambiguous_.erase({key.process_set, key.name});
  }
}

void TensorNumbers::decided(std::uint32_t id) {
  ++decisions_;
  const auto known = known_.find(id);
  if (known == known_.end()) return;
  known->second.decided_at = decisions_;
  if (is_root_) use(known->second);
}

void TensorNumbers::in_conflict(const std::vector<UnitKey>& keys) {
  ++decisions_;
  for (const auto& key : keys)
    if (const auto known = ids_.find(key); known != ids_.end())
      known_.at(known->second).decided_at = decisions_;
}

void TensorNumbers::note_use(std::uint32_t id) {
  if (const auto known = known_.find(id); is_root_ && known != known_.end()) use(known->second);
}

std::uint64_t TensorNumbers::last_decision(int process_set, const std::string& name) const {
  std::uint64_t last = refused_at_;
  for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
    if (const auto known = ids_.find({process_set, static_cast<OpKind>(kind), name});
        known != ids_.end())
      last = std::max(last, known_.at(known->second).decided_at);
  return last;
}

std::vector<std::uint32_t> TensorNumbers::to_retire(
    const std::function<bool(std::uint32_t)>& is_waited_for) {
  if (is_retiring() || known_.size() <= capacity_) return {};
  const auto count =
      std::min<std::uint64_t>({known_.size() - capacity_, decisions_ - retired_at_, kMostRetired});
  if (count < std::clamp<std::size_t>(capacity_ / 4, 1, kFewRetired)) return {};
  std::vector<std::uint32_t> ids;
  for (auto id = usage_.begin(); id != usage_.end() && ids.size() < count; ++id)
    if (!is_waited_for(*id)) ids.push_back(*id);
  retired_at_ = decisions_;
  return ids;
}

void TensorNumbers::begin_retiring(std::vector<std::uint32_t> ids, std::size_t children,
                                   const std::function<bool(const UnitKey&)>& drop) {
  if (is_retiring()) throw WireError("numbers are retired twice");
  retiring_ = std::move(ids);
  in_use_.clear();
  answers_missing_ = children;
  for (const auto id : retiring_) {
    const auto known = known_.find(id);
    if (known == known_.end()) continue;
    const UnitKey key = known->second.key;
    if (drop(key)) {
      if (!is_root_) unsure_.insert(key);
    } else {
      in_use_.insert(id);
      if (is_root_) use(known->second);
    }
  }
}

void TensorNumbers::answer(const std::vector<std::uint32_t>& in_use) {
  if (answers_missing_ == 0) throw WireError("an answer that nobody has asked for");
  in_use_.insert(in_use.begin(), in_use.end());
  --answers_missing_;
}

std::vector<std::uint32_t> TensorNumbers::given_up() {
  std::vector<std::uint32_t> ids;
  for (const auto id : retiring_) {
    const auto known = known_.find(id);
    if (known == known_.end()) continue;
    if (!in_use_.contains(id)) {
      ids.push_back(id);
    } else {
      use(known->second);
    }
  }
  return ids;
}

void TensorNumbers::end_retiring() {
  unsure_.clear();
  retiring_.clear();
}

}  // namespace hvd
