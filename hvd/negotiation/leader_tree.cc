#include "hvd/negotiation/leader_tree.h"

#include <algorithm>
#include <utility>

namespace hvd {

namespace {

constexpr std::uint64_t kFewRetired = 64;     // fewer at once are not worth the messages
constexpr std::uint64_t kMostRetired = 4096;  // more at once would hold up the leaders

enum class Item : std::uint8_t {
  IntroduceUp,
  IntroduceDown,
  Ready,
  Joined,
  Agree,
  Cut,
  LeaveUp,
  Leave,
  Doubt,
  Refuse,
  Retire,
  Retired,
  Forget,
  End,
  Fail,
  Stuck,
  Conflict,
  Credit,
};

void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
}

void merge(Agreement& into, const Agreement& from) {
  merge(into.present, from.present);
  into.absent.insert(into.absent.end(), from.absent.begin(), from.absent.end());
  std::sort(into.absent.begin(), into.absent.end());
  into.last = from.last;  // the part that comes later has the last word
}

}  // namespace

LeaderTree::LeaderTree(Transport& transport, LeaderTreeActions actions, std::size_t capacity)
    : transport_(transport), actions_(std::move(actions)), capacity_(capacity) {
  const int self = transport_.domain();
  if (self != 0) parent_ = self & (self - 1);
  for (int bit = 1; (self == 0 || bit < (self & -self)) && (self | bit) < transport_.domains(); bit <<= 1)
    children_.push_back({self | bit, std::min((self | bit) + bit, transport_.domains())});
}

std::vector<int> LeaderTree::neighbours_of(int domain, int domains) {
  std::vector<int> neighbours;
  if (domain != 0) neighbours.push_back(domain & (domain - 1));
  for (int bit = 1; (domain == 0 || bit < (domain & -domain)) && (domain | bit) < domains; bit <<= 1) neighbours.push_back(domain | bit);
  return neighbours;
}

Bytes LeaderTree::failure_message(const Status& status) {
  return Writer().put_bytes(Writer().put(Item::Fail).put(status.code()).put_string(status.text()).bytes()).take();
}

int LeaderTree::subtree_of(int domain) const {
  const auto child = std::find_if(children_.begin(), children_.end(), [&](const Child& c) { return domain >= c.domain && domain < c.end; });
  return child != children_.end() ? child->domain : domain == transport_.domain() ? domain : -1;
}

const std::set<int>& LeaderTree::subtrees_with(int process_set) {
  const auto [known, fresh] = subtrees_.try_emplace(process_set);
  const auto* ranks = fresh ? actions_.ranks_of(process_set) : nullptr;
  if (ranks != nullptr)
    for (const int rank : *ranks)
      if (const int subtree = subtree_of(actions_.domain_of(rank)); subtree >= 0) known->second.insert(subtree);
  return known->second;
}

/// Introductions keep their place among the rest: what is said after them must not overtake them, nor they what was said before.
void LeaderTree::send(int domain, const Bytes& item) {
  const bool up = domain == parent_;
  write(up ? up_ : down_, up);
  outgoing_[domain].put_bytes(item);
}
void LeaderTree::send_down(const Bytes& item) {
  for (const auto& child : children_) send(child.domain, item);
}

void LeaderTree::write(Gathered& gathered, bool up) {
  for (const auto& introduction : std::exchange(gathered, {}).list) {
    Writer item;
    item.put(up ? Item::IntroduceUp : Item::IntroduceDown);
    if (!up) item.put(introduction.id);
    encode(item, introduction.key);
    item.put_list(std::span<const Run>(introduction.ranks));
    encode(item, *introduction.signature);
    if (up) {
      outgoing_[parent_].put_bytes(item.bytes());
    } else {
      for (const auto& child : children_) outgoing_[child.domain].put_bytes(item.bytes());
    }
  }
}

void LeaderTree::Gathered::add(const Introduction& introduction) {
  const auto [place, fresh] = last.try_emplace(introduction.key, list.size());
  if (!fresh) {
    Introduction& before = list[place->second];
    if (before.signature == introduction.signature || *before.signature == *introduction.signature) {
      for (const Run run : introduction.ranks) hvd::add(before.ranks, run);
      return;
    }
    place->second = list.size();
  }
  list.push_back(introduction);
}

void LeaderTree::retell(const UnitKey& key) {
  const auto known = ids_.find(key);
  if (known == ids_.end()) return;
  for (const auto& [id, same_key, said, runs] : known_.at(known->second).remote) actions_.introduce(key, runs, *said);
}

/// Root: gives the tensor a number where it has none.
std::uint32_t LeaderTree::number_of(const UnitKey& key) {
  const auto [place, fresh] = ids_.try_emplace(key, next_id_);
  const std::uint32_t id = place->second;
  if (!fresh) {
    if (!retiring_.empty()) in_use_.insert(id);  // somebody has met it again
    return id;
  }
  ++next_id_;
  Known& known = known_[id];
  known.key = key;
  known.usage = usage_.insert(usage_.end(), id);
  return id;
}

void LeaderTree::introduced(const UnitKey& key, int rank, const SharedSignature& signature) {
  if (actions_.ranks_of(key.process_set) == nullptr) return;
  retell(key);
  if (!is_root()) return up_.add({0, key, signature, {{rank, 1}}});
  const std::uint32_t id = number_of(key);
  down_.add({id, key, signature, {{rank, 1}}});
}

void LeaderTree::receive_introduction(Reader& reader, bool from_parent) {
  Introduction introduction;
  if (from_parent) introduction.id = reader.get<std::uint32_t>();
  introduction.key = decode_key(reader);
  introduction.ranks = reader.get_list<Run>();
  introduction.signature = std::make_shared<const Signature>(decode_signature(reader));
  if (from_parent) next_id_ = std::max(next_id_, introduction.id + 1);
  if (!expect_ranks(introduction.key.process_set, introduction.ranks)) return;
  if (introduction.signature->kind != introduction.key.kind) throw WireError("an introduction that makes no sense");
  if (!from_parent && !is_root()) return up_.add(introduction);
  if (is_root()) introduction.id = number_of(introduction.key);
  down_.add(introduction);
  learn(introduction);
}

void LeaderTree::learn(const Introduction& introduction) {
  const auto id = introduction.id;
  const UnitKey& key = introduction.key;
  const SharedSignature& signature = introduction.signature;
  const auto& ranks = introduction.ranks;
  if (ids_.try_emplace(key, id).first->second != id) throw WireError("two numbers for one tensor");
  const auto [place, fresh] = known_.try_emplace(id);
  Known& known = place->second;
  if (fresh) known.key = key;
  if (known.key != key) throw WireError("two tensors with one number");
  // Equal signatures are kept once: what n ranks say of a tensor costs little more than what one says.
  auto& remote = known.remote;
  const auto same = std::find_if(remote.begin(), remote.end(), [&](const Introduction& other) { return *other.signature == *signature; });
  for (auto other = remote.begin(); other != remote.end(); ++other)
    for (const Run run : ranks) other == same ? add(other->ranks, run) : remove(other->ranks, run);
  if (same == remote.end()) {
    remote.push_back({id, key, signature, {}});
    for (const Run run : ranks) add(remote.back().ranks, run);
  }
  std::erase_if(remote, [](const Introduction& other) { return other.ranks.empty(); });
  actions_.introduce(key, ranks, *signature);
}

void LeaderTree::tell(LocalEvent news) {
  if (news.kind == LocalEvent::Kind::Introduced) return introduced(news.key, news.rank, news.signature);
  if (news.kind == LocalEvent::Kind::Removed) return removed(news.key.process_set);
  held_.push_back(std::move(news));
  say_held();
}

/// Nobody waits any more for what was to happen in a process set that is gone.
void LeaderTree::removed(int process_set) {
  const auto first = ids_.lower_bound(UnitKey{process_set, OpKind{}, {}});
  const auto end = ids_.lower_bound(UnitKey{process_set + 1, OpKind{}, {}});
  std::vector<UnitKey> keys;
  for (auto known = first; known != end; ++known) keys.push_back(known->first);
  for (const auto& key : keys) forget(key);
  subtrees_.erase(process_set);
  const auto of_set = [&](const auto& name) { return name.first.first == process_set; };
  std::erase_if(stuck_said_, of_set);
  std::erase_if(stuck_, of_set);
  std::erase_if(held_, [&](const LocalEvent& news) { return news.kind != LocalEvent::Kind::Left && news.key.process_set == process_set; });
  joined_.erase(process_set);
  join_order_.erase(process_set);
  pledged_.forget_set(process_set);
}

/// A tensor that is ready waits for its number, and is passed by others that are ready. But that a rank has joined or left means that
/// everything it was ready for has been said: this passes nothing, and what is ready after it does not pass it.
void LeaderTree::say_held() {
  bool barred = false;
  for (std::size_t i = 0; i < held_.size();) {
    const LocalEvent& next = held_[i];
    const auto known = ids_.find(next.key);
    const bool ready = next.kind == LocalEvent::Kind::Ready;
    barred = barred || (!ready && i > 0);
    if (barred || (ready && (known == ids_.end() || unsure_.contains(next.key)))) {
      ++i;
      continue;
    }
    const LocalEvent news = std::move(held_[i]);
    const auto id = ready ? known->second : 0;
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
    if (ready) {
      count_ready(id, transport_.domain(), news.what);
    } else if (news.kind == LocalEvent::Kind::Joined) {
      learn_joined(news.key.process_set, news.rank);
    } else if (news.kind == LocalEvent::Kind::Doubted) {
      doubted(news.key);
    } else {
      left(news.rank, news.pledges, transport_.domain());
    }
  }
}

void LeaderTree::count_ready(std::uint32_t id, int subtree, const Agreement& what) {
  Count& count = counts_[id];
  if (!count.subtrees.insert(subtree).second) throw WireError("readiness twice in one round");
  merge(count.what, what);
  pass_on_if_complete(id);
  if (!left_.empty() && counts_.contains(id)) refuse_if_hopeless(UnitKey(known_.at(id).key));
}

void LeaderTree::pass_on_if_complete(std::uint32_t id) {
  const UnitKey& key = known_.at(id).key;
  Count& count = counts_.at(id);
  std::vector<int> absent;
  if (count.subtrees.size() < subtrees_with(key.process_set).size()) {
    const auto joined = joined_.find(key.process_set);
    if (key.kind == OpKind::Join || joined == joined_.end()) return;
    const auto* ranks = actions_.ranks_of(key.process_set);
    if (ranks == nullptr) return;
    for (const int rank : *ranks) {
      const int subtree = subtree_of(actions_.domain_of(rank));
      if (subtree < 0 || count.subtrees.contains(subtree)) continue;
      if (!joined->second.contains(rank)) return;
      absent.push_back(rank);
    }
  }
  Agreement all = std::move(count.what);
  counts_.erase(id);
  all.absent.insert(all.absent.end(), absent.begin(), absent.end());
  std::sort(all.absent.begin(), all.absent.end());
  if (is_root()) {
    // A rank that joins last has seen everything decided that it was needed for, and so has this: the others' joins came before.
    for (const int rank : all.absent) note_join(key.process_set, rank);
    if (key.kind == OpKind::Join) {
      const auto order = join_order_.find(key.process_set);
      if (order == join_order_.end()) throw WireError("a join of nobody");
      all.last = order->second.back();
    }
    return decide(id, all);
  }
  Writer item;
  item.put(Item::Ready).put(id);
  encode(item, all);
  send(parent_, item.bytes());
}

std::vector<int> LeaderTree::awaited(const UnitKey& key) const {
  std::vector<int> ranks;
  const auto known = ids_.find(key);
  const auto count = known == ids_.end() ? counts_.end() : counts_.find(known->second);
  if (count == counts_.end()) return ranks;
  const auto joined = joined_.find(key.process_set);
  const auto* all = actions_.ranks_of(key.process_set);
  if (all == nullptr) return ranks;
  for (const int rank : *all) {
    const int subtree = subtree_of(actions_.domain_of(rank));
    const bool excused = key.kind != OpKind::Join && joined != joined_.end() && joined->second.contains(rank);
    if (subtree >= 0 && !count->second.subtrees.contains(subtree) && !excused) ranks.push_back(rank);
  }
  return ranks;
}

void LeaderTree::decide(std::uint32_t id, const Agreement& what) {
  Writer item;
  item.put(Item::Agree).put(id);
  encode(item, what);
  send_down(item.bytes());
  actions_.agree(known_.at(id).key, what);
  decided(id);
}

void LeaderTree::decided(std::uint32_t id) {
  ++decided_;
  const auto known = known_.find(id);
  if (known == known_.end()) return;
  counts_.erase(id);
  known->second.decided_at = decided_;
  if (is_root()) usage_.splice(usage_.end(), usage_, known->second.usage);
  const UnitKey& key = known->second.key;
  pledged_.consume(key);
  if (key.kind == OpKind::Join) {
    joined_.erase(key.process_set);
    join_order_.erase(key.process_set);
  }
  if (!stuck_.empty()) stuck_.erase({key.process_set, key.name});
}

/// The same everywhere, at the same place in the stream.
std::uint64_t LeaderTree::last_decision(const Name& name) const {
  std::uint64_t last = refused_at_;
  for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
    if (const auto known = ids_.find({name.first, static_cast<OpKind>(kind), name.second}); known != ids_.end())
      last = std::max(last, known_.at(known->second).decided_at);
  return last;
}

void LeaderTree::note_join(int process_set, int rank) {
  auto& order = join_order_[process_set];
  if (std::find(order.begin(), order.end(), rank) == order.end()) order.push_back(rank);
}

void LeaderTree::learn_joined(int process_set, int rank) {
  if (actions_.ranks_of(process_set) == nullptr) return;
  note_join(process_set, rank);
  joined_[process_set].insert(rank);
  std::vector<std::uint32_t> waiting;
  for (const auto& [id, count] : counts_)
    if (known_.at(id).key.process_set == process_set) waiting.push_back(id);
  std::sort(waiting.begin(), waiting.end());
  for (const auto id : waiting)
    if (counts_.contains(id)) pass_on_if_complete(id);
  if (!is_root()) send(parent_, Writer().put(Item::Joined).put(process_set).put(rank).bytes());
}

void LeaderTree::stuck(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks) {
  if (!held_.empty()) return;  // it must not pass what is said of before
  const std::uint64_t now = last_decision({process_set, name});
  const auto [said, fresh] = stuck_said_.try_emplace({process_set, name}, now);
  if (!fresh && said->second == now) return;
  said->second = now;
  Writer item;
  item.put(Item::Stuck).put(process_set).put_string(name).put(now);
  encode(item, stuck_ranks);
  if (!is_root()) return send(parent_, item.bytes());
  Reader reader(item.bytes());
  reader.get<std::uint8_t>();
  receive_stuck(reader, item.bytes());
}

void LeaderTree::receive_stuck(Reader& reader, std::span<const std::byte> item) {
  if (!is_root()) return send(parent_, Bytes(item.begin(), item.end()));
  const int process_set = reader.get<int>();
  const Name name{process_set, reader.get_string()};
  // Said before a decision under that name was known there: it may be out of date.
  const auto said_after = reader.get<std::uint64_t>();
  const auto* ranks = actions_.ranks_of(process_set);
  if (ranks == nullptr || said_after != last_decision(name)) return;
  auto& by_rank = stuck_[name];
  for (const auto& stuck_rank : decode_stuck_ranks(reader)) by_rank[stuck_rank.rank] = stuck_rank.kind;
  std::vector<StuckRank> stuck_ranks;
  for (const int rank : *ranks) {
    const auto stuck_rank = by_rank.find(rank);
    if (stuck_rank == by_rank.end()) return;
    stuck_ranks.push_back({rank, stuck_rank->second});
  }
  const auto differs = [&](const StuckRank& stuck_rank) { return stuck_rank.kind != stuck_ranks.front().kind; };
  if (std::none_of(stuck_ranks.begin(), stuck_ranks.end(), differs)) return;
  Writer out;
  out.put(Item::Conflict).put(process_set).put_string(name.second);
  encode(out, stuck_ranks);
  Reader again(out.bytes());
  again.get<std::uint8_t>();
  receive_conflict(again, out.bytes());
}

/// Drops whatever readiness was counted for the operations that are in conflict.
void LeaderTree::receive_conflict(Reader& reader, std::span<const std::byte> item) {
  send_down(Bytes(item.begin(), item.end()));
  const int process_set = reader.get<int>();
  const Name name{process_set, reader.get_string()};
  const auto stuck_ranks = decode_stuck_ranks(reader);
  for (const auto& stuck_rank : stuck_ranks) {
    const UnitKey key{process_set, stuck_rank.kind, name.second};
    std::erase_if(held_, [&](const LocalEvent& news) { return news.kind == LocalEvent::Kind::Ready && news.key == key; });
    const auto known = ids_.find(key);
    if (known == ids_.end()) continue;
    counts_.erase(known->second);
    known_.at(known->second).decided_at = decided_ + 1;
  }
  ++decided_;
  stuck_.erase(name);
  if (actions_.ranks_of(process_set) == nullptr) return;
  actions_.conflict(process_set, name.second, stuck_ranks);
}

void LeaderTree::announce_cut(int process_set) { send_down(Writer().put(Item::Cut).put(process_set).bytes()); }

void LeaderTree::tell_credit(int process_set, int domain, std::uint64_t over) {
  send(parent_, Writer().put(Item::Credit).put(process_set).put(domain).put(over).bytes());
}

void LeaderTree::receive_credit(Reader& reader, const Bytes& item) {
  if (!is_root()) return send(parent_, item);
  const int process_set = reader.get<int>();
  const int domain = reader.get<int>();
  actions_.credit(process_set, domain, reader.get<std::uint64_t>());
}

void LeaderTree::announce_end() { send_down(Writer().put(Item::End).bytes()); }

namespace {
void put_pledges(Writer& writer, const Pledges& pledges) {
  writer.put(static_cast<std::uint32_t>(pledges.size()));
  for (const auto& [key, rounds] : pledges) {
    encode(writer, key);
    writer.put(rounds);
  }
}
Pledges get_pledges(Reader& reader) {
  Pledges pledges;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    UnitKey key = decode_key(reader);
    pledges[std::move(key)] = reader.get<std::uint32_t>();
  }
  return pledges;
}
}  // namespace

/// A rank of `subtree` has left. Only the root can say what can never be complete without it, so it must know what the rank still takes
/// part in: what it had arrived at, of which its domain tells, and what its part of the tree was said to be ready for, on the way up: each
/// leader adds what waits with it for its other subtrees.
void LeaderTree::left(int rank, Pledges pledges, int subtree) {
  for (const auto& [id, count] : counts_) {
    const UnitKey& key = known_.at(id).key;
    const auto* ranks = actions_.ranks_of(key.process_set);
    const auto& absent = count.what.absent;
    if (ranks != nullptr && count.subtrees.contains(subtree) && std::binary_search(ranks->begin(), ranks->end(), rank) &&
        !std::binary_search(absent.begin(), absent.end(), rank))
      ++pledges[key];
  }
  if (!is_root()) {
    Writer item;
    item.put(Item::LeaveUp).put(rank);
    put_pledges(item, pledges);
    send(parent_, item.bytes());
    return held_back_.empty() ? spread_leaving(rank, subtree) : hold_back_leaving(rank, subtree);
  }
  left_.insert(rank);
  for (const auto& [key, rounds] : pledges) pledged_.add(key, rank, rounds);
  spread_leaving(rank, subtree);
  std::vector<UnitKey> waiting;
  for (const auto& [id, count] : counts_) waiting.push_back(known_.at(id).key);
  for (const auto& key : waiting) refuse_if_hopeless(key);
}

void LeaderTree::receive_leaving(Reader& reader, int from) {
  const int rank = reader.get<int>();
  expect_rank(0, rank);
  Pledges pledges = get_pledges(reader);
  for (const auto& [key, rounds] : pledges) expect_rank(key.process_set, rank);
  left(rank, std::move(pledges), subtree_of(from));
}

/// `from`: the neighbour that has said so, or this domain.
void LeaderTree::spread_leaving(int rank, int from) {
  const Bytes item = Writer().put(Item::Leave).put(rank).take();
  for (const auto& child : children_)
    if (child.domain != from) send(child.domain, item);
  if (from != transport_.domain()) actions_.leave(rank);  // this domain's log says so already
}

/// The parent knows already.
void LeaderTree::hold_back_leaving(int rank, int from) {
  Writer message;
  message.put_bytes(Writer().put(Item::Leave).put(rank).bytes());
  held_back_.push_back({{from, message.take()}, 0, true, true});
}

/// A rank of this subtree waits for what a rank that has left takes part in.
void LeaderTree::doubted(const UnitKey& key) {
  if (is_root()) return refuse_if_hopeless(key);
  Writer item;
  item.put(Item::Doubt);
  encode(item, key);
  send(parent_, item.bytes());
}

/// Root: says that the tensor can never be complete, if that is so.
void LeaderTree::refuse_if_hopeless(const UnitKey& key) {
  const auto joined = joined_.find(key.process_set);
  const auto* ranks = actions_.ranks_of(key.process_set);
  if (ranks == nullptr) return;
  for (const int rank : *ranks) {
    if (!left_.contains(rank) || pledged_.contains(key, rank)) continue;
    if (key.kind != OpKind::Join && joined != joined_.end() && joined->second.contains(rank)) continue;
    return refuse(key, rank);
  }
}

/// Whoever waits for the tensor waits for it no more; who submits it again introduces it anew. Its number is given up, so that what is said
/// of the round that is over finds nothing to count for.
void LeaderTree::refuse(const UnitKey& key, int rank) {
  Writer item;
  item.put(Item::Refuse);
  encode(item, key);
  item.put(rank);
  send_down(item.bytes());
  refused_at_ = ++decided_;
  stuck_.erase({key.process_set, key.name});
  pledged_.forget(key);
  std::erase_if(held_, [&](const LocalEvent& news) { return news.kind == LocalEvent::Kind::Ready && news.key == key; });
  forget(key);
  actions_.refuse(key, rank);
}

void LeaderTree::forget(const UnitKey& key) {
  const auto known = ids_.find(key);
  if (known == ids_.end()) return;
  const std::uint32_t id = known->second;
  if (is_root()) usage_.erase(known_.at(id).usage);
  if (!stuck_said_.empty()) stuck_said_.erase({key.process_set, key.name});
  unsure_.erase(key);
  counts_.erase(id);
  known_.erase(id);
  ids_.erase(known);
}

/// Root: asks the domains to forget those tensors that were not decided for longest, when there are more than are to be remembered. Only so
/// often as there are decisions, so that tensors that are all in use are not asked about without end.
void LeaderTree::retire_some() {
  if (!is_root() || !retiring_.empty() || known_.size() <= capacity_) return;
  const auto count = std::min<std::uint64_t>({known_.size() - capacity_, decided_ - retired_at_, kMostRetired});
  if (count < std::clamp<std::size_t>(capacity_ / 4, 1, kFewRetired)) return;
  std::vector<std::uint32_t> ids;
  for (auto id = usage_.begin(); id != usage_.end() && ids.size() < count; ++id)
    if (!counts_.contains(*id)) ids.push_back(*id);
  retired_at_ = decided_;
  if (!ids.empty()) retire(std::move(ids));
}

void LeaderTree::retire(std::vector<std::uint32_t> ids) {
  retiring_ = std::move(ids);
  in_use_.clear();
  answers_missing_ = children_.size();
  Writer item;
  item.put(Item::Retire).put_list(std::span<const std::uint32_t>(retiring_));
  send_down(item.bytes());
  for (const auto id : retiring_) {
    const auto known = known_.find(id);
    if (known == known_.end()) continue;
    const UnitKey key = known->second.key;
    if (actions_.drop(key)) {
      if (!is_root()) unsure_.insert(key);
    } else {
      in_use_.insert(id);
      if (is_root()) usage_.splice(usage_.end(), usage_, known->second.usage);
    }
  }
  answer_if_complete();
}

void LeaderTree::answer_if_complete() {
  if (answers_missing_ > 0) return;
  const std::vector<std::uint32_t> kept(in_use_.begin(), in_use_.end());
  Writer item;
  if (!is_root()) return send(parent_, item.put(Item::Retired).put_list(std::span<const std::uint32_t>(kept)).bytes());
  std::vector<std::uint32_t> forgotten;
  for (const auto id : retiring_) {
    const auto known = known_.find(id);
    if (known == known_.end()) continue;
    if (!in_use_.contains(id)) {
      forgotten.push_back(id);
    } else {
      usage_.splice(usage_.end(), usage_, known->second.usage);
    }
  }
  send_down(item.put(Item::Forget).put_list(std::span<const std::uint32_t>(forgotten)).bytes());
  end_retiring(forgotten);
}

void LeaderTree::end_retiring(const std::vector<std::uint32_t>& forgotten) {
  for (const auto id : forgotten)
    if (const auto known = known_.find(id); known != known_.end()) forget(UnitKey(known->second.key));
  unsure_.clear();
  retiring_.clear();
}

void LeaderTree::failed(const Status& status) {
  if (std::exchange(failed_, true)) return;
  Writer item;
  item.put(Item::Fail).put(status.code()).put_string(status.text());
  if (!is_root()) send(parent_, item.bytes());
  send_down(item.bytes());
}

/// False if the set was removed.
bool LeaderTree::expect_rank(int process_set, int rank) {
  const auto* ranks = actions_.ranks_of(process_set);
  if (ranks == nullptr) return false;
  if (!std::binary_search(ranks->begin(), ranks->end(), rank)) throw WireError("a rank outside its process set");
  return true;
}

/// False if the set was removed.
bool LeaderTree::expect_ranks(int process_set, const Runs& runs) {
  const auto* all = actions_.ranks_of(process_set);
  if (all == nullptr) return false;
  const auto& ranks = *all;
  for (const Run run : runs) {
    // The list ascends, so that the run is in it if its ends are as far apart there.
    const auto first = std::lower_bound(ranks.begin(), ranks.end(), run.first);
    const bool fits = run.count > 0 && run.count <= ranks.end() - first && *first == run.first;
    if (!fits || first[run.count - 1] - run.first != run.count - 1) throw WireError("a rank outside its process set");
  }
  return true;
}

/// Acting on a decision takes time that grows with the world (every rank's word is looked at), so it is passed on first: else each hop of
/// the way down would add that time. True if there is nothing but decisions in the message, and the children have it.
bool LeaderTree::pass_on_decisions(const Message& message) {
  if (message.from != parent_) return false;
  for (Reader items(message.bytes); !items.at_end();) {
    const Bytes bytes = items.get_list<std::byte>();
    const auto item = static_cast<Item>(Reader(bytes).get<std::uint8_t>());
    if (item != Item::Agree && item != Item::Cut) return false;
  }
  flush();
  for (auto child = children_.rbegin(); child != children_.rend(); ++child) transport_.send(child->domain, message.bytes);
  return true;
}

void LeaderTree::receive(const Message& message) {
  if (message.from == parent_ && !held_back_.empty()) return hold_back(message);
  const bool passed_on = pass_on_decisions(message);
  std::size_t done = 0;
  act_on(done, message, passed_on);
  if (done < message.bytes.size()) held_back_.push_back({message, done, passed_on, true});
}

/// A failure does not wait its turn: what it must come after may never happen.
void LeaderTree::hold_back(Message message) {
  for (Reader items(message.bytes); !items.at_end();) {
    const Bytes bytes = items.get_list<std::byte>();
    Reader reader(bytes);
    if (static_cast<Item>(reader.get<std::uint8_t>()) == Item::Fail && !failed_) receive_failure(reader, bytes, message.from);
  }
  held_back_.push_back({std::move(message)});
}

/// True if that brought anything.
bool LeaderTree::take_held_back() {
  if (failed_) held_back_.clear();
  bool any = false;
  while (!held_back_.empty()) {
    HeldBack& next = held_back_.front();
    if (!std::exchange(next.begun, true)) next.passed_on = pass_on_decisions(next.message);
    const std::size_t before = next.done;
    act_on(next.done, next.message, next.passed_on);
    any = any || next.done > before;
    say_held();  // numbers may have come
    if (next.done < next.message.bytes.size()) break;
    held_back_.pop_front();
  }
  return any;
}

/// Acts on the items of a message from byte `at` on, and moves it past what is done: to the end, or to a cut that must wait.
void LeaderTree::act_on(std::size_t& at, const Message& message, bool passed_on) {
  Reader items(std::span<const std::byte>(message.bytes).subspan(at));
  while (!items.at_end()) {
    const Bytes bytes = items.get_list<std::byte>();
    if (!act_on_item(bytes, message, passed_on)) return;
    at = message.bytes.size() - items.left();
  }
}

/// False if it is a cut that must wait; nothing has happened then.
bool LeaderTree::act_on_item(const Bytes& bytes, const Message& message, bool passed_on) {
  const bool from_parent = message.from == parent_;
  const auto downwards = [&](bool expected) {
    if (from_parent != expected) throw WireError("a message from the wrong side");
  };
  Reader reader(bytes);
  const auto item = static_cast<Item>(reader.get<std::uint8_t>());
  switch (item) {
    case Item::IntroduceUp:
    case Item::IntroduceDown:
      downwards(item == Item::IntroduceDown);
      receive_introduction(reader, from_parent);
      break;
    case Item::Ready: {
      downwards(false);
      const auto id = reader.get<std::uint32_t>();
      if (id >= next_id_) throw WireError("readiness of an unknown tensor");
      // Said before the number's end was heard of: of a round that is over, or said again under another number.
      const Agreement what = decode_agreement(reader);
      if (known_.contains(id)) count_ready(id, subtree_of(message.from), what);
      break;
    }
    case Item::Joined: {
      downwards(false);
      const auto process_set = reader.get<int>();
      const int rank = reader.get<int>();
      if (expect_rank(process_set, rank)) learn_joined(process_set, rank);
      break;
    }
    case Item::Agree: {
      downwards(true);
      const auto id = reader.get<std::uint32_t>();
      if (id >= next_id_) throw WireError("agreement on an unknown tensor");
      if (!passed_on) send_down(bytes);
      const Agreement what = decode_agreement(reader);
      if (const auto known = known_.find(id); known != known_.end())
        actions_.agree(UnitKey(known->second.key), what);  // or its set is gone
      decided(id);
      break;
    }
    case Item::Cut:
      downwards(true);
      if (!actions_.cut(reader.get<int>())) return false;
      if (!passed_on) send_down(bytes);
      break;
    case Item::LeaveUp:
      downwards(false);
      receive_leaving(reader, message.from);
      break;
    case Item::Leave: {
      if (!passed_on) downwards(true);
      const int rank = reader.get<int>();
      expect_rank(0, rank);
      spread_leaving(rank, message.from);
      break;
    }
    case Item::Doubt: {
      downwards(false);
      const UnitKey key = decode_key(reader);
      if (actions_.ranks_of(key.process_set) != nullptr) doubted(key);
      break;
    }
    case Item::Refuse: {
      downwards(true);
      const UnitKey key = decode_key(reader);
      const int rank = reader.get<int>();
      static_cast<void>(expect_rank(key.process_set, rank));
      refuse(key, rank);
      break;
    }
    case Item::Credit:
      downwards(false);
      receive_credit(reader, bytes);
      break;
    case Item::Retire: {
      downwards(true);
      if (!retiring_.empty()) throw WireError("numbers are retired twice");
      retire(reader.get_list<std::uint32_t>());
      break;
    }
    case Item::Retired: {
      downwards(false);
      if (answers_missing_ == 0) throw WireError("an answer that nobody has asked for");
      for (const auto id : reader.get_list<std::uint32_t>()) in_use_.insert(id);
      --answers_missing_;
      answer_if_complete();
      break;
    }
    case Item::Forget:
      downwards(true);
      send_down(bytes);
      end_retiring(reader.get_list<std::uint32_t>());
      break;
    case Item::Stuck:
      downwards(false);
      receive_stuck(reader, bytes);
      break;
    case Item::Conflict:
      downwards(true);
      receive_conflict(reader, bytes);
      break;
    case Item::End:
      downwards(true);
      send_down(bytes);
      actions_.end();
      break;
    case Item::Fail:
      if (!failed_) receive_failure(reader, bytes, message.from);
      break;
    default:
      throw WireError("unknown kind of message");
  }
  return true;
}

void LeaderTree::receive_failure(Reader& reader, std::span<const std::byte> item, int from) {
  const auto code =
      static_cast<Status::Code>(std::min(reader.get<std::uint8_t>(), static_cast<std::uint8_t>(Status::Code::InvalidArgument)));
  const Status status(code, reader.get_string());
  const Bytes bytes(item.begin(), item.end());
  if (from != parent_ && !is_root()) send(parent_, bytes);
  for (const auto& child : children_)
    if (child.domain != from) send(child.domain, bytes);
  failed_ = true;
  actions_.fail(status);
}

bool LeaderTree::flush() {
  write(up_, true);
  write(down_, false);
  // The highest child first: its subtree is the largest and has the longest way still to go.
  const auto outgoing = std::exchange(outgoing_, {});
  for (auto items = outgoing.rbegin(); items != outgoing.rend(); ++items) transport_.send(items->first, items->second.bytes());
  return !outgoing.empty();
}

bool LeaderTree::advance() {
  retire_some();
  bool any = flush();
  any = take_held_back() || any;
  while (auto message = transport_.receive()) {
    any = true;
    receive(*message);
    say_held();
  }
  return flush() || any;
}

}  // namespace hvd
