#include "hvd/relay.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hvd {

namespace {

enum class Item : std::uint8_t { IntroduceUp, IntroduceDown, Ready, Agree, Cut, Leave, Fail };

void put_key(Writer& writer, const UnitKey& key) { writer.put(key.process_set).put(key.kind).put_string(key.name); }

UnitKey get_key(Reader& reader) {
  UnitKey key;
  key.process_set = reader.get<int>();
  key.kind = reader.get<OpKind>();
  key.name = reader.get_string();
  return key;
}

void put_presence(Writer& writer, const std::vector<bool>& present) {
  std::vector<std::uint8_t> bytes(present.begin(), present.end());
  writer.put_list(std::span<const std::uint8_t>(bytes));
}

std::vector<bool> get_presence(Reader& reader) {
  const auto bytes = reader.get_list<std::uint8_t>();
  return {bytes.begin(), bytes.end()};
}

void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
}

}  // namespace

Relay::Relay(Transport& transport, RelayActions actions) : transport_(transport), actions_(std::move(actions)) {
  const int self = transport_.domain();
  if (self != 0) parent_ = self & (self - 1);
  for (int bit = 1; (self == 0 || bit < (self & -self)) && (self | bit) < transport_.domains(); bit <<= 1)
    children_.push_back({self | bit, std::min((self | bit) + bit, transport_.domains())});
}

std::uint32_t Relay::subtrees_with(int process_set) const {
  const auto domains = actions_.domains_of(process_set);
  const auto any_in = [&](int begin, int end) {
    const auto first = std::lower_bound(domains.begin(), domains.end(), begin);
    return first != domains.end() && *first < end;
  };
  const int self = transport_.domain();
  std::uint32_t count = any_in(self, self + 1) ? 1 : 0;
  for (const auto& child : children_) count += any_in(child.domain, child.end) ? 1 : 0;
  return count;
}

void Relay::send(int domain, const Bytes& item) { outgoing_[domain].put_bytes(item); }
void Relay::send_down(const Bytes& item) {
  for (const auto& child : children_) send(child.domain, item);
}

void Relay::introduced(const UnitKey& key, int rank, const Signature& signature) {
  // This domain may have forgotten a name that the others still know: tell its log again what they said.
  if (const auto known = ids_.find(key); known != ids_.end()) {
    for (const auto& [other, said] : known_.at(known->second).remote) actions_.introduce(key, other, *said);
  }
  if (is_root()) {
    const auto [place, fresh] = ids_.try_emplace(key, next_id_);
    if (fresh) ++next_id_;
    const std::uint32_t id = place->second;
    known_[id].key = key;
    return spread_introduction(id, key, rank, signature);
  }
  Writer item;
  item.put(Item::IntroduceUp);
  put_key(item, key);
  item.put(rank);
  encode(item, signature);
  send(parent_, item.bytes());
}

void Relay::spread_introduction(std::uint32_t id, const UnitKey& key, int rank, const Signature& signature) {
  Writer item;
  item.put(Item::IntroduceDown).put(id);
  put_key(item, key);
  item.put(rank);
  encode(item, signature);
  send_down(item.bytes());
}

void Relay::receive_introduction(Reader& reader, bool from_parent) {
  const auto id = from_parent ? reader.get<std::uint32_t>() : 0;
  const UnitKey key = get_key(reader);
  const int rank = reader.get<int>();
  const Signature signature = decode_signature(reader);
  if (from_parent) {
    spread_introduction(id, key, rank, signature);
    return learn(id, key, rank, signature);
  }
  if (!is_root()) {
    Writer item;
    item.put(Item::IntroduceUp);
    put_key(item, key);
    item.put(rank);
    encode(item, signature);
    return send(parent_, item.bytes());
  }
  const auto [place, fresh] = ids_.try_emplace(key, next_id_);
  if (fresh) ++next_id_;
  spread_introduction(place->second, key, rank, signature);
  learn(place->second, key, rank, signature);
}

void Relay::learn(std::uint32_t id, const UnitKey& key, int rank, const Signature& signature) {
  ids_[key] = id;
  Known& known = known_[id];
  known.key = key;
  known.remote[rank] = std::make_shared<const Signature>(signature);
  actions_.introduce(key, rank, signature);
  if (const auto waiting = ready_without_id_.extract(key); !waiting.empty()) count_ready(id, waiting.mapped());
}

void Relay::domain_ready(const UnitKey& key, const std::vector<bool>& present) {
  const auto known = ids_.find(key);
  if (known == ids_.end()) {
    merge(ready_without_id_[key], present);
  } else {
    count_ready(known->second, present);
  }
}

void Relay::count_ready(std::uint32_t id, const std::vector<bool>& present) {
  Count& count = counts_[id];
  merge(count.present, present);
  if (++count.subtrees < subtrees_with(known_.at(id).key.process_set)) return;
  const std::vector<bool> all = std::move(count.present);
  counts_.erase(id);
  if (is_root()) return decide(id, all);
  Writer item;
  item.put(Item::Ready).put(id);
  put_presence(item, all);
  send(parent_, item.bytes());
}

void Relay::decide(std::uint32_t id, const std::vector<bool>& present) {
  Writer item;
  item.put(Item::Agree).put(id);
  put_presence(item, present);
  send_down(item.bytes());
  actions_.agree(known_.at(id).key, present);
  forget_if_unnamed(id);
}

void Relay::forget_if_unnamed(std::uint32_t id) {
  const auto known = known_.find(id);
  if (known == known_.end() || !is_unnamed(known->second.key.name)) return;
  ids_.erase(known->second.key);
  known_.erase(known);
}

void Relay::announce_cut() { send_down(Writer().put(Item::Cut).bytes()); }

void Relay::left(int rank) {
  const Bytes item = Writer().put(Item::Leave).put(rank).take();
  if (!is_root()) send(parent_, item);
  send_down(item);
}

void Relay::failed(const Status& status) {
  if (std::exchange(failed_, true)) return;
  Writer item;
  item.put(Item::Fail).put(status.code()).put_string(status.text());
  if (!is_root()) send(parent_, item.bytes());
  send_down(item.bytes());
}

void Relay::receive(const Message& message) {
  const bool from_parent = message.from == parent_;
  Reader items(message.bytes);
  while (!items.at_end()) {
    const Bytes bytes = items.get_list<std::byte>();
    Reader reader(bytes);
    switch (static_cast<Item>(reader.get<std::uint8_t>())) {
      case Item::IntroduceUp:
      case Item::IntroduceDown:
        receive_introduction(reader, from_parent);
        break;
      case Item::Ready: {
        const auto id = reader.get<std::uint32_t>();
        if (!known_.contains(id)) throw WireError("readiness of an unknown tensor");
        count_ready(id, get_presence(reader));
        break;
      }
      case Item::Agree: {
        const auto id = reader.get<std::uint32_t>();
        const auto known = known_.find(id);
        if (known == known_.end()) throw WireError("agreement on an unknown tensor");
        send_down(bytes);
        actions_.agree(known->second.key, get_presence(reader));
        forget_if_unnamed(id);
        break;
      }
      case Item::Cut:
        send_down(bytes);
        actions_.cut();
        break;
      case Item::Leave: {
        if (!from_parent && !is_root()) send(parent_, bytes);
        for (const auto& child : children_)
          if (child.domain != message.from) send(child.domain, bytes);
        actions_.leave(reader.get<int>());
        break;
      }
      case Item::Fail: {
        const auto code = reader.get<Status::Code>();
        const Status status(code, reader.get_string());
        if (!from_parent && !is_root()) send(parent_, bytes);
        for (const auto& child : children_)
          if (child.domain != message.from) send(child.domain, bytes);
        failed_ = true;
        actions_.fail(status);
        break;
      }
      default:
        throw WireError("unknown kind of message");
    }
  }
}

bool Relay::flush() {
  const bool any = !outgoing_.empty();
  for (auto& [domain, items] : std::exchange(outgoing_, {})) transport_.send(domain, items.bytes());
  return any;
}

bool Relay::advance() {
  bool any = flush();
  while (auto message = transport_.receive()) {
    any = true;
    receive(*message);
  }
  return flush() || any;
}

}  // namespace hvd
