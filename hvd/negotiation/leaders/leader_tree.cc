#include "hvd/negotiation/leaders/leader_tree.h"

#include <algorithm>
#include <utility>

namespace hvd {

LeaderTree::LeaderTree(Transport& transport, LeaderTreeActions actions, std::size_t capacity)
    : links_(transport),
      inbox_(links_, [this](const Bytes& item, int from, bool passed_on) { return act_on(item, from, passed_on); }),
      actions_(std::move(actions)),
      numbers_(links_.is_root(), capacity),
      counts_([this](int rank) { return links_.subtree_of(actions_.domain_of(rank)); }) {}

bool LeaderTree::advance() {
  bool any = send();
  any = hear() || any;
  return links_.flush() || any;
}

bool LeaderTree::send() {
  if (is_root())
    if (auto ids = numbers_.to_retire([this](std::uint32_t id) { return counts_.contains(id); }); !ids.empty()) retire(std::move(ids));
  return links_.flush();
}

bool LeaderTree::hear() {
  bool any = false;
  if (failed_) inbox_.clear();
  if (!put_off_.empty()) refuse_put_off();
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

// ----------------------------------------------------------------------------------------------------------- what this domain says

void LeaderTree::tell(LocalEvent event) {
  if (event.kind == LocalEvent::Kind::Introduced) return introduced(event.key, event.rank, event.signature);
  if (event.kind == LocalEvent::Kind::Removed) return removed(event.key.process_set);
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

/// Nobody waits any more for what was to happen in a process set that is gone.
void LeaderTree::removed(int process_set) {
  for (const auto& key : numbers_.keys_of_set(process_set)) forget(key);
  counts_.forget_set(process_set);
  stuck_names_.forget_set(process_set);
  departed_.forget_set(process_set);
  unsaid_.forget_set(process_set);
}

void LeaderTree::say_unsaid() {
  if (unsaid_.is_empty()) return;
  const auto has_number = [this](const UnitKey& key) { return numbers_.find(key) && !numbers_.is_unsure(key); };
  unsaid_.say_all(has_number, [this](const LocalEvent& event) { say(event); });
}

void LeaderTree::say(const LocalEvent& event) {
  if (event.kind == LocalEvent::Kind::Ready) {
    const auto id = numbers_.find(event.key).value();
    if (actions_.said_ready) actions_.said_ready(id);
    count_ready(id, links_.self(), event.what);
  } else if (event.kind == LocalEvent::Kind::Joined) {
    learn_joined(event.key.process_set, event.rank);
  } else if (event.kind == LocalEvent::Kind::Doubted) {
    doubted(event.key);
  } else {
    left(event.rank, event.pledges, links_.self());
  }
}

void LeaderTree::stuck(int process_set, const std::string& name, const std::vector<StuckRank>& stuck_ranks) {
  if (!unsaid_.is_empty()) return;  // it must not pass what is said of before
  const StuckReport report{process_set, name, last_decision(process_set, name), stuck_ranks};
  if (!stuck_names_.note_said(report)) return;
  is_root() ? note_stuck(report) : links_.send_up(LeaderItems::stuck(report));
}

void LeaderTree::blocked(BlockedReport report) {
  if (failed_) return;
  // What this domain has still to say of before must not be passed: the same is said again once it is said.
  if (!unsaid_.is_empty() || inbox_.is_waiting()) report.ranks.clear();
  for (const auto& rank : report.ranks)
    for (const auto& key : rank.submitted) report.last_decisions[key] = last_decision(key.process_set, key.name);
  const bool is_new = blocked_.note_said(report);
  if (!is_root() && is_new) links_.send_up(LeaderItems::blocked(report));
  if (!is_root()) return;
  if (is_new) blocked_.add(std::move(report));
  end_deadlocks();
}

void LeaderTree::failed(const Status& status) {
  if (std::exchange(failed_, true)) return;
  const Bytes item = LeaderItems::fail(status);
  if (!is_root()) links_.send_up(item);
  links_.send_down(item);
}

// ------------------------------------------------------------------------------------------------------------ what the others say

/// Returns false if it is a cut that must wait; nothing has happened then.
bool LeaderTree::act_on(const Bytes& bytes, int from, bool passed_on) {
  Reader reader(bytes);
  const LeaderItem item = decode_item(reader);
  const Way way = way_of(item);
  // That a rank of this subtree has left may have waited here on its way to the other children.
  const bool from_here = item == LeaderItem::Leave && passed_on;
  if (way != Way::Any && !from_here && (from == links_.parent()) != (way == Way::Down)) throw WireError("a message from the wrong side");
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
    case LeaderItem::Ready:
      return receive_ready(reader, from);
    case LeaderItem::Joined: {
      const auto process_set = reader.get<int>();
      const int rank = reader.get<int>();
      if (expect_ranks(process_set, {{rank, 1}})) learn_joined(process_set, rank);
      return;
    }
    case LeaderItem::LeaveUp:
      return receive_leaving(reader, from);
    case LeaderItem::Doubt:
      if (const UnitKey key = decode_key(reader); actions_.ranks_of(key.process_set) != nullptr) doubted(key);
      return;
    case LeaderItem::Retired:
      numbers_.answer(reader.get_list<std::uint32_t>());
      return answer_if_complete();
    case LeaderItem::Stuck:
      return is_root() ? note_stuck(decode_stuck(reader)) : links_.send_up(bytes);
    case LeaderItem::Credit: {
      if (!is_root()) return links_.send_up(bytes);
      const int process_set = reader.get<int>();
      const int domain = reader.get<int>();
      return actions_.credit(process_set, domain, reader.get<std::uint64_t>());
    }
    case LeaderItem::Blocked:
      return receive_blocked(reader, bytes);
    default:
      throw WireError("not a message for a parent");
  }
}

bool LeaderTree::act_on_downward(LeaderItem item, Reader& reader, const Bytes& bytes, int from, bool passed_on) {
  switch (item) {
    case LeaderItem::IntroduceDown:
      receive_introduction(decode_introduced(reader, true), true);
      break;
    case LeaderItem::Agree:
      receive_agreement(reader, bytes, passed_on);
      break;
    case LeaderItem::Cut:
      if (!actions_.cut(reader.get<int>())) return false;
      if (!passed_on) links_.send_down(bytes);
      break;
    case LeaderItem::Leave: {
      const int rank = reader.get<int>();
      static_cast<void>(expect_ranks(0, {{rank, 1}}));
      spread_leaving(rank, from);
      break;
    }
    case LeaderItem::Refuse: {
      const UnitKey key = decode_key(reader);
      const int rank = reader.get<int>();
      const std::string text = reader.get_string();
      static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
      if (is_promised(key)) return false;  // the round before is still under way here
      refuse(key, rank, text);
      break;
    }
    case LeaderItem::Retire:
      retire(reader.get_list<std::uint32_t>());
      break;
    case LeaderItem::Forget:
      links_.send_down(bytes);
      end_retiring(reader.get_list<std::uint32_t>());
      break;
    case LeaderItem::Conflict:
      end_conflict(decode_conflict(reader));
      break;
    case LeaderItem::End:
      links_.send_down(bytes);
      actions_.end();
      break;
    default:
      throw WireError("not a message for a child");
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
  // Else said before the number's end was heard of: of a round that is over, or said again under another number.
  if (numbers_.key_of(id) != nullptr) count_ready(id, links_.subtree_of(from), what);
}

void LeaderTree::receive_agreement(Reader& reader, const Bytes& item, bool passed_on) {
  const auto id = reader.get<std::uint32_t>();
  if (!numbers_.was_given(id)) throw WireError("agreement on an unknown tensor");
  if (!passed_on) links_.send_down(item);
  const Agreement what = decode_agreement(reader);
  if (const UnitKey* const key = numbers_.key_of(id)) actions_.agree(UnitKey(*key), what);  // or its set is gone
  decided(id);
}

void LeaderTree::receive_leaving(Reader& reader, int from) {
  const int rank = reader.get<int>();
  static_cast<void>(expect_ranks(0, {{rank, 1}}));
  Pledges pledges = decode_pledges(reader);
  for (const auto& [key, rounds] : pledges) static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
  left(rank, std::move(pledges), links_.subtree_of(from));
}

void LeaderTree::receive_failure(Reader& reader, const Bytes& item, int from) {
  const Status status = decode_failure(reader);
  if (from != links_.parent() && !is_root()) links_.send_up(item);
  links_.send_down(item, from);
  failed_ = true;
  actions_.fail(status);
}

// ------------------------------------------------------------------------------------------------------------------------ decisions

void LeaderTree::count_ready(std::uint32_t id, int subtree, const Agreement& what) {
  counts_.add(id, subtree, what);
  pass_on_if_complete(id);
  if (!departed_.is_empty() && counts_.contains(id)) refuse_if_hopeless(UnitKey(*numbers_.key_of(id)));
}

void LeaderTree::pass_on_if_complete(std::uint32_t id) {
  const UnitKey& key = *numbers_.key_of(id);
  auto all = counts_.take_if_complete(id, key, actions_.ranks_of(key.process_set));
  if (!all) return;
  if (is_root()) return decide(id, std::move(*all));
  links_.send_up(LeaderItems::ready(id, *all));
}

void LeaderTree::decide(std::uint32_t id, Agreement what) {
  const UnitKey key = *numbers_.key_of(id);
  // A rank that joins last has seen everything decided that it was needed for, and so has this: the others' joins came before.
  for (const int rank : what.absent) counts_.note_join(key.process_set, rank);
  if (key.kind == OpKind::Join) what.last = counts_.last_joined(key.process_set);
  links_.send_down(LeaderItems::agree(id, what));
  actions_.agree(key, what);
  decided(id);
}

void LeaderTree::decided(std::uint32_t id) {
  numbers_.decided(id);
  const UnitKey* const key = numbers_.key_of(id);
  if (key == nullptr) return;
  over(id);
  counts_.erase(id);
  departed_.decided(*key);
  if (key->kind == OpKind::Join) counts_.end_join(key->process_set);
  stuck_names_.decided(key->process_set, key->name);
}

void LeaderTree::learn_joined(int process_set, int rank) {
  if (actions_.ranks_of(process_set) == nullptr) return;
  counts_.join(process_set, rank);
  for (const auto id : counts_.waiting())
    if (counts_.contains(id) && numbers_.key_of(id)->process_set == process_set) pass_on_if_complete(id);
  if (!is_root()) links_.send_up(LeaderItems::joined(process_set, rank));
}

/// A rank of `subtree` has left. Only the root can say what can never be complete without it, so it must know what the rank still takes
/// part in: what it had arrived at, of which its domain tells, and what its part of the tree was said to be ready for, on the way up: each
/// leader adds what waits with it for its other subtrees.
void LeaderTree::left(int rank, Pledges pledges, int subtree) {
  for (const auto id : counts_.waiting()) {
    const UnitKey& key = *numbers_.key_of(id);
    const auto* ranks = actions_.ranks_of(key.process_set);
    const bool in_set = ranks != nullptr && std::binary_search(ranks->begin(), ranks->end(), rank);
    if (in_set && counts_.is_ready(id, subtree, rank)) ++pledges[key];
  }
  if (!is_root()) {
    links_.send_up(LeaderItems::leave_up(rank, pledges));
    // It must not overtake what was decided before.
    return inbox_.is_waiting() ? inbox_.wait_with(LeaderItems::leave(rank), subtree) : spread_leaving(rank, subtree);
  }
  departed_.add(rank, pledges);
  spread_leaving(rank, subtree);
  std::vector<UnitKey> waiting;
  for (const auto id : counts_.waiting()) waiting.push_back(*numbers_.key_of(id));
  for (const auto& key : waiting) refuse_if_hopeless(key);
}

/// `from`: the neighbour that has said so, or this domain.
void LeaderTree::spread_leaving(int rank, int from) {
  links_.send_down(LeaderItems::leave(rank), from);
  if (from != links_.self()) actions_.leave(rank);  // this domain's log says so already
}

/// A rank of this subtree waits for what a rank that has left takes part in.
void LeaderTree::doubted(const UnitKey& key) { is_root() ? refuse_if_hopeless(key) : links_.send_up(LeaderItems::doubt(key)); }

/// Root: says that the tensor can never be complete, if that is so.
void LeaderTree::refuse_if_hopeless(const UnitKey& key) {
  const auto* ranks = actions_.ranks_of(key.process_set);
  if (ranks == nullptr) return;
  if (is_promised(key)) return static_cast<void>(put_off_.insert(key));
  const auto has_joined = [&](int rank) { return counts_.has_joined(key.process_set, rank); };
  if (const auto rank = departed_.blocker_of(key, *ranks, has_joined)) refuse(key, *rank);
}

/// Whoever waits for the tensor waits for it no more; who submits it again introduces it anew. Its number is given up, so that what is said
/// of the round that is over finds nothing to count for.
void LeaderTree::refuse(const UnitKey& key, int rank, const std::string& text) {
  links_.send_down(LeaderItems::refuse(key, rank, text));
  numbers_.refused();
  stuck_names_.decided(key.process_set, key.name);
  departed_.forget(key);
  unsaid_.drop_ready(key);
  forget(key);
  actions_.refuse(key, rank, text);
}

void LeaderTree::receive_blocked(Reader& reader, const Bytes& item) {
  if (!is_root()) return links_.send_up(item);
  BlockedReport report = decode_blocked_report(reader);
  for (const auto& [rank, waits, submitted] : report.ranks) {
    for (const auto& key : waits) static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
    for (const auto& key : submitted) static_cast<void>(expect_ranks(key.process_set, {{rank, 1}}));
  }
  blocked_.add(std::move(report));
}

/// Root: ends what blocked ranks wait for and can never get.
void LeaderTree::end_deadlocks() {
  const auto decision = [this](const UnitKey& key) { return last_decision(key.process_set, key.name); };
  const auto found = blocked_.find(actions_.ranks_of, decision);
  const std::string who = found.empty() ? "" : found.front().text;
  if (std::exchange(deadlock_, who) != who) return;
  for (const auto& [key, missing, text] : found)
    if (!is_promised(key)) refuse(key, missing, text);
}

/// Root: ranks of a domain are stuck.
void LeaderTree::note_stuck(const StuckReport& report) {
  const auto* ranks = actions_.ranks_of(report.process_set);
  // What was said before a decision under that name was known there may be out of date.
  if (ranks == nullptr || report.last_decision != last_decision(report.process_set, report.name)) return;
  if (auto all = stuck_names_.add(report, *ranks)) end_conflict({report.process_set, report.name, 0, std::move(*all)});
}

/// Drops whatever readiness was counted for the operations that are in conflict.
void LeaderTree::end_conflict(const StuckReport& report) {
  links_.send_down(LeaderItems::conflict(report));
  std::vector<UnitKey> keys;
  for (const auto& stuck_rank : report.ranks) {
    keys.push_back({report.process_set, stuck_rank.kind, report.name});
    unsaid_.drop_ready(keys.back());
    if (const auto id = numbers_.find(keys.back())) {
      counts_.erase(*id);
      over(*id);
    }
  }
  numbers_.in_conflict(keys);
  stuck_names_.decided(report.process_set, report.name);
  if (actions_.ranks_of(report.process_set) != nullptr) actions_.conflict(report.process_set, report.name, report.ranks);
}

// -------------------------------------------------------------------------------------------------------------------------- numbers

void LeaderTree::forget(const UnitKey& key) {
  const auto id = numbers_.find(key);
  if (!id) return;
  stuck_names_.forget(key.process_set, key.name);
  counts_.erase(*id);
  put_off_.erase(key);
  if (actions_.forgotten) actions_.forgotten(*id);
  numbers_.forget(key);
}

void LeaderTree::over(std::uint32_t id) {
  if (actions_.over) actions_.over(id);
}

bool LeaderTree::is_promised(const UnitKey& key) const {
  const auto id = numbers_.find(key);
  return id && actions_.is_promised && actions_.is_promised(*id);
}

/// Root: looks again at what may never be complete, and was promised.
void LeaderTree::refuse_put_off() {
  const auto waiting = std::exchange(put_off_, {});
  for (const auto& key : waiting) refuse_if_hopeless(key);
}

/// Returns what changes with each end of a round under the name: rounds that the leaders end among themselves are no decisions, but are
/// counted like them.
std::uint64_t LeaderTree::last_decision(int process_set, const std::string& name) const {
  std::uint64_t rounds = 0;
  if (actions_.rounds_over)
    for (int kind = 0; kind <= static_cast<int>(OpKind::Control); ++kind)
      if (const auto id = numbers_.find({process_set, static_cast<OpKind>(kind), name})) rounds += actions_.rounds_over(*id);
  return numbers_.last_decision(process_set, name) + (rounds << 32);
}

void LeaderTree::retire(std::vector<std::uint32_t> ids) {
  links_.send_down(LeaderItems::retire(ids));
  numbers_.begin_retiring(std::move(ids), links_.children(), actions_.drop);
  answer_if_complete();
}

void LeaderTree::answer_if_complete() {
  if (!numbers_.have_all_answered()) return;
  if (!is_root()) return links_.send_up(LeaderItems::retired(numbers_.in_use()));
  const auto given_up = numbers_.given_up();
  links_.send_down(LeaderItems::forget(given_up));
  end_retiring(given_up);
}

void LeaderTree::end_retiring(const std::vector<std::uint32_t>& given_up) {
  for (const auto id : given_up)
    if (const UnitKey* const key = numbers_.key_of(id)) forget(UnitKey(*key));
  numbers_.end_retiring();
}

}  // namespace hvd
