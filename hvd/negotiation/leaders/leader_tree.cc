#include "hvd/negotiation/leaders/leader_tree.h"

#include <algorithm>
#include <utility>

namespace hvd {

LeaderTree::LeaderTree(Transport& transport, LeaderTreeActions actions, std::size_t capacity)
    : links_(transport),
      inbox_(links_, [this](const Bytes& item, int from,
                            bool passed_on) { return act_on(item, from, passed_on); }),
      actions_(std::move(actions)),
      numbers_(links_.is_root(), capacity),
      counts_([this](int rank) { return links_.subtree_of(actions_.domain_of(rank)); }),
      decisions_(links_, inbox_, unsaid_, numbers_, counts_, actions_) {}

bool LeaderTree::advance() {
  bool any = send();
  any = hear() || any;
  return links_.flush() || any;
}

bool LeaderTree::send() {
  if (is_root())
    if (auto ids = numbers_.to_retire([this](std::uint32_t id) { return counts_.contains(id); });
        !ids.empty())
      decisions_.retire(std::move(ids));
  return links_.flush();
}

bool LeaderTree::hear() {
  bool any = false;
  if (failed_) inbox_.clear();
  decisions_.refuse_put_off();
  for (; inbox_.take_waiting(); any = true) say_unsaid();  // numbers may have come
  while (auto message = links_.receive()) {
    any = true;
    inbox_.receive(*message);
    say_unsaid();
  }
  return any;
}

std::vector<int> LeaderTree::awaited(const UnitKey& key) const {
  const auto id = numbers_.find(key);
  const auto* ranks = actions_.ranks_of(key.process_set);
  return id && ranks != nullptr ? counts_.awaited(*id, key, *ranks) : std::vector<int>();
}

// --------------------------------------------------------------------------- what this domain says

void LeaderTree::tell(LocalEvent event) {
  if (event.kind == LocalEvent::Kind::Introduced)
    return introduced(event.key, event.rank, event.signature);
  if (event.kind == LocalEvent::Kind::Removed) return decisions_.removed(event.key.process_set);
  if (event.kind == LocalEvent::Kind::Lingering) return count_lingering(event.change);
  unsaid_.add(std::move(event));
  say_unsaid();
}

void LeaderTree::introduced(const UnitKey& key, int rank, const SharedSignature& signature) {
  if (actions_.ranks_of(key.process_set) == nullptr) return;
  retell(key);
  if (is_root()) {
    links_.introduce_down({numbers_.give(key), key, signature, {{rank, 1}}});
  } else {
    links_.introduce_up({0, key, signature, {{rank, 1}}});
  }
}

void LeaderTree::retell(const UnitKey& key) {
  const auto* const remote = numbers_.said_elsewhere(key);
  if (remote == nullptr) return;
  for (const auto& [id, same_key, said, runs] : *remote) actions_.introduce(key, runs, *said);
}

void LeaderTree::say_unsaid() {
  if (unsaid_.is_empty()) return;
  const auto has_number = [this](const UnitKey& key) {
    return numbers_.find(key) && !numbers_.is_unsure(key);
  };
  unsaid_.say_all(has_number, [this](const LocalEvent& event) { say(event); });
}

void LeaderTree::say(const LocalEvent& event) {
  if (event.kind == LocalEvent::Kind::Ready) {
    const auto id = numbers_.find(event.key).value();
    if (actions_.said_ready) actions_.said_ready(id);
    decisions_.count_ready(id, links_.self(), event.what);
  } else if (event.kind == LocalEvent::Kind::Joined) {
    decisions_.learn_joined(event.key.process_set, event.rank);
  } else if (event.kind == LocalEvent::Kind::Doubted) {
    decisions_.doubted(event.key);
  } else {
    decisions_.left(event.rank, event.pledges, links_.self());
  }
}

/// A rank has sends or recvs pending as it leaves, of which the root hears before that it has left;
/// or it has none any more.
void LeaderTree::count_lingering(int change) {
  if (change != 1 && (change != -1 || (is_root() && lingering_ == 0)))
    throw WireError("ranks with messages that make no sense");
  if (!is_root()) return links_.send_up(LeaderItems::lingering(change));
  lingering_ += change;
}

void LeaderTree::failed(const Status& status) {
  if (std::exchange(failed_, true)) return;
  // Not by way of leaders that may be slow: whoever has heard of it ends, and a lost connection is
  // blamed on them where that is seen first.
  links_.send_to_all(LeaderItems::fail(status));
}

// ----------------------------------------------------------------------------- what the others say

/// Returns false if it is a cut that must wait; nothing has happened then.
bool LeaderTree::act_on(const Bytes& bytes, int from, bool passed_on) {
  Reader reader(bytes);
  const LeaderItem item = decode_item(reader);
  const Way way = way_of(item);
  // That a rank of this subtree has left may have waited here on its way to the other children.
  const bool from_here = item == LeaderItem::Leave && passed_on;
  if (way != Way::Any && !from_here && (from == links_.parent()) != (way == Way::Down))
    throw WireError("a message from the wrong side");
  if (way == Way::Down) return act_on_downward(item, reader, bytes, from, passed_on);
  if (way == Way::Up) {
    act_on_upward(item, reader, bytes, from);
  } else if (!failed_) {
    receive_failure(reader, bytes, from);
  }
  return true;
}

void LeaderTree::act_on_upward(LeaderItem item, Reader& reader, const Bytes& bytes, int from) {
  switch (item) {
    case LeaderItem::IntroduceUp:
      return receive_introduction(decode_introduced(reader, false), false);
    case LeaderItem::Ready: return receive_ready(reader, from);
    case LeaderItem::Joined: {
      const auto process_set = reader.get<int>();
      const int rank = reader.get<int>();
      if (expect_ranks(process_set, {{rank, 1}})) decisions_.learn_joined(process_set, rank);
      return;
    }
    case LeaderItem::LeaveUp: return receive_leaving(reader, from);
    case LeaderItem::Doubt:
      if (const UnitKey key = decode_key(reader); actions_.ranks_of(key.process_set) != nullptr)
        decisions_.doubted(key);
      return;
    case LeaderItem::Retired:
      numbers_.answer(reader.get_list<std::uint32_t>());
      return decisions_.answer_if_complete();
    case LeaderItem::Stuck:
      return is_root() ? decisions_.note_stuck(decode_stuck(reader)) : links_.send_up(bytes);
    case LeaderItem::Credit: {
      if (!is_root()) return links_.send_up(bytes);
      const int process_set = reader.get<int>();
      const int domain = reader.get<int>();
      return actions_.credit(process_set, domain, reader.get<std::uint64_t>());
    }
    case LeaderItem::Blocked: return receive_blocked(reader, bytes);
    case LeaderItem::Late: return receive_late(reader, from);
    case LeaderItem::Linger: return count_lingering(reader.get<int>());
    default: throw WireError("not a message for a parent");
  }
}

bool LeaderTree::act_on_downward(LeaderItem item, Reader& reader, const Bytes& bytes, int from,
                                 bool passed_on) {
  switch (item) {
    case LeaderItem::IntroduceDown:
      receive_introduction(decode_introduced(reader, true), true);
      break;
    case LeaderItem::Agree: receive_agreement(reader, bytes, passed_on); break;
    case LeaderItem::Cut:
      if (!actions_.cut(reader.get<int>())) return false;
      if (!passed_on) links_.send_down(bytes);
      break;
    case LeaderItem::Leave: {
      const int rank = reader.get<int>();
      static_cast<void>(expect_ranks(0, {{rank, 1}}));
      decisions_.spread_leaving(rank, from);
      break;
    }
    case LeaderItem::Refuse: {
      const UnitKey key = decode_key(reader);
      const int rank = reader.get<int>();
      const std::string text = reader.get_string();
      static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
      if (decisions_.is_promised(key)) return false;  // the round before is still under way here
      decisions_.refuse(key, rank, text);
      break;
    }
    case LeaderItem::Retire: decisions_.retire(reader.get_list<std::uint32_t>()); break;
    case LeaderItem::Forget:
      links_.send_down(bytes);
      decisions_.end_retiring(reader.get_list<std::uint32_t>());
      break;
    case LeaderItem::Conflict: decisions_.end_conflict(decode_conflict(reader)); break;
    case LeaderItem::End:
      links_.send_down(bytes);
      actions_.end();
      break;
    default: throw WireError("not a message for a child");
  }
  return true;
}

/// Returns false if the set was removed.
bool LeaderTree::expect_ranks(int process_set, const Runs& runs) const {
  const auto* ranks = actions_.ranks_of(process_set);
  if (ranks == nullptr) return false;
  for (const Run run : runs)
    if (!find_run(*ranks, run)) throw WireError("a rank outside its process set");
  return true;
}

void LeaderTree::receive_introduction(Introduction introduction, bool from_parent) {
  if (from_parent) numbers_.note_given(introduction.id);
  if (!expect_ranks(introduction.key.process_set, introduction.ranks)) return;
  if (!from_parent && !is_root()) return links_.introduce_up(introduction);
  if (is_root()) introduction.id = numbers_.give(introduction.key);
  links_.introduce_down(introduction);
  numbers_.learn(introduction);
  actions_.introduce(introduction.key, introduction.ranks, *introduction.signature);
}

void LeaderTree::receive_ready(Reader& reader, int from) {
  const auto id = reader.get<std::uint32_t>();
  if (!numbers_.was_given(id)) throw WireError("readiness of an unknown tensor");
  const Agreement what = decode_agreement(reader);
  // Else said before the number's end was heard of: of a round that is over, or said again under
  // another number.
  if (numbers_.key_of(id) != nullptr) decisions_.count_ready(id, links_.subtree_of(from), what);
}

void LeaderTree::receive_agreement(Reader& reader, const Bytes& item, bool passed_on) {
  const auto id = reader.get<std::uint32_t>();
  if (!numbers_.was_given(id)) throw WireError("agreement on an unknown tensor");
  if (!passed_on) links_.send_down(item);
  const Agreement what = decode_agreement(reader);
  // or its set is gone
  if (const UnitKey* const key = numbers_.key_of(id)) actions_.agree(UnitKey(*key), what);
  decisions_.decided(id);
}

void LeaderTree::receive_leaving(Reader& reader, int from) {
  const int rank = reader.get<int>();
  static_cast<void>(expect_ranks(0, {{rank, 1}}));
  Pledges pledges = decode_pledges(reader);
  for (const auto& [key, rounds] : pledges)
    static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
  decisions_.left(rank, std::move(pledges), links_.subtree_of(from));
}

void LeaderTree::receive_failure(Reader& reader, const Bytes& item, int from) {
  const Status status = decode_status(reader);
  if (from != links_.parent() && !is_root()) links_.send_up(item);
  links_.send_down(item, from);
  failed_ = true;
  actions_.fail(status);
}

void LeaderTree::receive_blocked(Reader& reader, const Bytes& item) {
  if (!is_root()) return links_.send_up(item);
  BlockedReport report = decode_blocked_report(reader);
  for (const auto& [rank, waits, submitted] : report.ranks) {
    for (const auto& key : waits) static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
    for (const auto& key : submitted) static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
  }
  decisions_.note_blocked(std::move(report));
}

void LeaderTree::receive_late(Reader& reader, int from) {
  LateReport report = decode_late_report(reader);
  const auto expect = [&](const std::vector<int>& ranks) {
    for (const int rank : ranks)
      static_cast<void>(expect_ranks(report.key.process_set, {{rank, 1}}));
  };
  if (!expect_ranks(report.key.process_set, {{report.rank, 1}})) return;
  expect(report.missing);
  for (const auto& ranks : report.some_of) expect(ranks);
  decisions_.late(std::move(report), links_.subtree_of(from));
}

}  // namespace hvd
