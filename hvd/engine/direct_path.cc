#include "hvd/engine/direct_path.h"

#include <algorithm>
#include <set>
#include <utility>

namespace hvd {

namespace {

constexpr int kTries = 8;  // to read the log to its end

std::uint64_t domains_on_other_hosts(const Topology& topology) {
  std::set<int> elsewhere;
  for (int rank = 0; rank < topology.size; ++rank)
    if (topology.host_of(rank) != topology.host_of(topology.rank))
      elsewhere.insert(topology.domain_of_rank[static_cast<std::size_t>(rank)]);
  return elsewhere.size();
}

}  // namespace

std::optional<Message> DirectLane::take(std::deque<Message>& messages) {
  if (messages.empty()) return std::nullopt;
  Message message = std::move(messages.front());
  messages.pop_front();
  return message;
}

bool DirectLane::look() {
  auto message = wire_.receive();
  if (!message) return false;
  if (DirectRounds::is_direct(*message)) {
    DirectRounds::split(std::move(*message), [this](Message one) { direct_.push_back(std::move(one)); });
  } else {
    others_.push_back(std::move(*message));
  }
  return true;
}

std::optional<Message> DirectLane::receive() {
  while (others_.empty() && look()) {
  }
  return take(others_);
}

std::optional<Message> DirectLane::take_direct() { return take(direct_); }

DirectPath::DirectPath(const EngineParts& parts, NegotiationLog& log, FastPath& fast_path, Transport& wire)
    : parts_(parts),
      log_(log),
      fast_path_(fast_path),
      board_(*parts.board),
      domains_elsewhere_(domains_on_other_hosts(parts.topology)),
      lane_(wire),
      rounds_(parts.topology.domain, parts.topology.domains) {}

// The tree calls these under the engine's mutex.
void DirectPath::add_actions(LeaderTreeActions& actions) {
  actions.said_ready = [this](std::uint32_t number) { rounds_.go_long(number); };
  actions.over = [this](std::uint32_t number) { rounds_.end(number); };
  actions.forgotten = [this](std::uint32_t number) { rounds_.forget(number); };
  actions.is_promised = [this](std::uint32_t number) { return rounds_.is_promised(number); };
  actions.rounds_over = [this](std::uint32_t number) { return rounds_.rounds_over(number); };
}

bool DirectPath::drive(LeaderTree& tree) {
  bool any = act_on_messages(tree);
  any = promise_rounds(tree) || any;
  any = end_rounds(tree) || any;
  if (rounds_.has_promised()) rounds_.ask(Clock::now());
  return rounds_.flush(lane_) || any;
}

bool DirectPath::look(LeaderTree& tree) {
  bool any = promise_rounds(tree);
  if (any) rounds_.flush(lane_);
  while (lane_.look()) any = true;
  return any && drive(tree);
}

PersistentOp* DirectPath::find(const UnitKey& key) const {
  const Unit* const unit = table().find(key);
  if (unit == nullptr) return nullptr;
  const auto& ops = fast_path_.direct_ops();
  const auto found = std::find_if(ops.begin(), ops.end(), [&](const PersistentOp* op) { return op->unit == unit->ref(); });
  return found == ops.end() ? nullptr : *found;
}

bool DirectPath::act_on_messages(LeaderTree& tree) {
  bool any = false;
  while (auto message = lane_.take_direct()) {
    any = true;
    const UnitKey* const key = tree.key_of(DirectRounds::number_of(*message));
    const bool cannot_come =
        key != nullptr && table().has_process_set(key->process_set) && (!table().joined(key->process_set).empty() || table().any_left());
    std::uint32_t fallen_back = 0;
    if (rounds_.receive(std::move(*message), key != nullptr, cannot_come, fallen_back)) fall_back(UnitKey(*key));
  }
  return any;
}

/// What this domain has contributed is of no use: its ranks take the long way.
void DirectPath::fall_back(const UnitKey& key) {
  PersistentOp* const op = find(key);
  if (op == nullptr) return;  // it has failed meanwhile
  {
    const BoardLock lock(board_);
    board_.take_promise_back(op->unit.id);
  }
  fast_path_.take_long_way(*op);
}

/// Whether all ranks of this domain have arrived, and nothing has been said of it yet.
bool DirectPath::is_to_begin(const PersistentOp& op) const {
  if (!table().knows(op.unit.id) || board_.arrivals(op.unit.id) != op.indices.size()) return false;
  const Unit& unit = table().unit(op.unit.id);
  return unit.generation == op.unit.generation && !unit.undecided && !board_.is_promised(op.unit.id);
}

/// For each operation that all ranks of this domain have arrived at: contributes, or takes the long way.
bool DirectPath::promise_rounds(LeaderTree& tree) {
  bool any = false;
  const auto& ops = fast_path_.direct_ops();
  for (std::size_t i = 0; i < ops.size();) {
    PersistentOp& op = *ops[i];
    Promise promise = Promise::ReadFirst;
    for (int tries = 0; promise == Promise::ReadFirst && is_to_begin(op); ++tries) {
      log_.read();  // which may end it, or others
      if (i >= ops.size() || ops[i] != &op) break;
      promise = tries < kTries ? try_to_promise(op, tree) : Promise::No;
    }
    if (i >= ops.size() || ops[i] != &op) continue;
    any = any || promise != Promise::ReadFirst;
    if (promise == Promise::No) fast_path_.take_long_way(op);
    if (i < ops.size() && ops[i] == &op) ++i;
  }
  return any;
}

/// Whether ranks of this domain have said that they remove the set: a round that was promised now might end here alone.
bool DirectPath::is_being_removed(int process_set) const {
  const Unit* const removal = table().removal_of(process_set);
  return removal != nullptr && (removal->undecided || board_.arrivals(removal->id) > 0);
}

DirectPath::Promise DirectPath::try_to_promise(PersistentOp& op, LeaderTree& tree) {
  const auto number = tree.number_of(op.key());
  const bool may_promise = number && rounds_.may_promise(*number);
  {
    const BoardLock lock(board_);  // who joins or leaves says so before this, and is seen, or finds the promise
    if (board_.tail() != board_.read_position() || !is_to_begin(op)) return Promise::ReadFirst;
    if (!may_promise || is_being_removed(op.set->id) || !fast_path_.can_run_for_all(op)) return Promise::No;
    board_.promise(op.unit.id);
  }
  Bytes contribution;
  if (op.leaders != nullptr) op.leaders->contribute(op.traits, op.count, fast_path_.blocks(), contribution);
  parts_.stats->add(parts_.stats->bytes_to_other_hosts, contribution.size() * domains_elsewhere_);
  rounds_.promise(*number, std::move(contribution), Clock::now());
  return Promise::Made;
}

bool DirectPath::end_rounds(LeaderTree& tree) {
  if (!rounds_.has_promised()) return false;
  const auto complete = rounds_.complete();
  std::vector<PersistentOp*> ops;
  for (const auto number : complete) ops.push_back(find(*tree.key_of(number)));
  const auto together = [&](std::size_t i) {  // with the one before
    return i > 0 && i < ops.size() && ops[i - 1] != nullptr && ops[i] != nullptr && share_batch(*ops[i - 1], *ops[i]);
  };
  for (std::size_t i = 0; i < complete.size(); ++i) {
    const auto number = complete[i];
    PersistentOp* const op = ops[i];
    if (op != nullptr && fast_path_.find_blocks(*op)) {
      if (op->leaders != nullptr) op->leaders->combine(op->traits, op->count, rounds_.contributions(number), fast_path_.blocks());
      fast_path_.give_results(*op, company_of(together(i) ? 1 : 0, together(i) || together(i + 1) ? 2 : 1));
    }
    rounds_.end(number);
    tree.note_use(number);
  }
  return !complete.empty();
}

}  // namespace hvd
