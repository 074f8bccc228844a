#include "hvd/engine/leader/direct_path.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

namespace hvd {

namespace {

std::uint64_t domains_on_other_hosts(const Topology& topology) {
  std::set<int> elsewhere;
  for (int rank = 0; rank < topology.size; ++rank)
    if (topology.host_of(rank) != topology.host_of(topology.rank))
      elsewhere.insert(topology.domain_of_rank[static_cast<std::size_t>(rank)]);
  return elsewhere.size();
}

}  // namespace

bool DirectLane::look() {
  auto message = wire_.receive();
  if (!message) return false;
  if (DirectRounds::is_direct(*message)) {
    const int from = message->from;
    DirectRounds::split(std::move(*message), [&](DirectRounds::Part one) {
      direct_.push_back({from, std::move(one)});
    });
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

DirectPath::DirectPath(const EngineParts& parts, NegotiationLog& log, FastPath& fast_path,
                       Transport& wire)
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

/// Returns the operation in flight that the leaders call so; null if there is none any more. They
/// are mostly looked for in their order.
RepeatedOp* DirectPath::find(std::uint32_t number, const UnitKey& key) {
  const auto& ops = fast_path_.direct_ops();
  for (std::size_t looks = 0; looks < ops.size(); ++looks) {
    if (found_at_ >= ops.size()) found_at_ = 0;
    RepeatedOp* const op = ops[found_at_++];
    if (op->number == number && op->key == key) return op;
  }
  return nullptr;
}

bool DirectPath::act_on_messages(LeaderTree& tree) {
  bool any = false;
  while (auto message = lane_.take_direct()) {
    any = true;
    const auto number = DirectRounds::number_of(message->message);
    const UnitKey* const key = tree.key_of(number);
    const bool cannot_come =
        key != nullptr && table().sets().has(key->process_set) &&
        (!table().sets().joined(key->process_set).empty() || table().any_left());
    std::uint32_t fallen_back = 0;
    if (rounds_.receive(message->from, std::move(message->message), key != nullptr, cannot_come,
                        fallen_back))
      fall_back(number, *key);
  }
  return any;
}

/// Gives up this domain's contribution: its ranks negotiate the operation.
void DirectPath::fall_back(std::uint32_t number, const UnitKey& key) {
  RepeatedOp* const op = find(number, key);
  if (op == nullptr) return;  // it has failed meanwhile
  {
    const BoardLock lock(board_);
    board_.rounds().take_promise_back(op->unit.id);
  }
  fast_path_.take_long_way(*op);
}

/// Returns whether all ranks of this domain have arrived, and nothing has been said of it yet.
bool DirectPath::is_to_begin(const RepeatedOp& op) const {
  if (board_.rounds().is_promised(op.unit.id) ||
      board_.rounds().arrivals(op.unit.id) != op.indices.size() || !table().knows(op.unit.id))
    return false;
  const Unit& unit = table().unit(op.unit.id);
  return unit.generation == op.unit.generation && !unit.undecided;
}

bool DirectPath::has_any_to_begin() const {
  const auto& ops = fast_path_.direct_ops();
  return std::ranges::any_of(
      ops, [this](const RepeatedOp* op) HVD_REQUIRES(engine_mutex) { return is_to_begin(*op); });
}

/// Contributes to each operation at which this domain has arrived, or has it negotiated.
bool DirectPath::promise_rounds(LeaderTree& tree) {
  if (!has_any_to_begin()) return false;
  promised_.clear();
  slow_.clear();
  {
    // who joins or leaves says so before this, and is seen, or finds the round prepared
    const BoardLock lock(board_);
    log_.read();
    judge(tree);
  }
  for (std::size_t i = 0; i < promised_.size(); ++i) {
    contribute(*promised_[i], promised_.size() - i);
    rounds_.flush_full(lane_);
  }
  for (const UnitRef& unit : slow_) {
    const auto& ops = fast_path_.direct_ops();
    const auto op =
        std::ranges::find_if(ops, [&](const RepeatedOp* other) { return other->unit == unit; });
    if (op != ops.end() && is_to_begin(**op)) fast_path_.take_long_way(**op);
  }
  return !promised_.empty() || !slow_.empty();
}

/// Prepares the rounds that this domain can contribute to, and lists those that it cannot. Requires
/// the board's lock, and that the log is read.
void DirectPath::judge(LeaderTree& tree) {
  for (RepeatedOp* const op : fast_path_.direct_ops()) {
    if (!is_to_begin(*op)) continue;
    if (may_promise(*op, tree)) {
      board_.rounds().promise(op->unit.id);
      promised_.push_back(op);
    } else {
      slow_.push_back(op->unit);
    }
  }
}

bool DirectPath::may_promise(RepeatedOp& op, const LeaderTree& tree) {
  const UnitKey* const called = tree.key_of(op.number);
  if (called == nullptr || !(*called == op.key))
    op.number = tree.number_of(op.key).value_or(RepeatedOp::kNoNumber);
  return op.number != RepeatedOp::kNoNumber && rounds_.may_promise(op.number) &&
         !is_being_removed(op.set->id) && fast_path_.work().is_possible(op);
}

/// `left`: how many contributions follow at once, with this one.
void DirectPath::contribute(RepeatedOp& op, std::size_t left) {
  if (!fast_path_.work().find_blocks(op))
    throw std::logic_error("leaders: a prepared round without the blocks that were there");
  const std::size_t bytes =
      op.leaders == nullptr ? 0 : op.leaders->contribution_bytes(op.traits, op.count);
  rounds_.promise(op.number, Clock::now(), bytes, left * bytes,
                  [&, blocks = fast_path_.work().inputs(op)](Bytes& message) {
                    const std::size_t before = message.size();
                    if (op.leaders != nullptr)
                      op.leaders->contribute(op.traits, op.count, blocks, message);
                    parts_.stats->add(parts_.stats->bytes_to_other_hosts,
                                      (message.size() - before) * domains_elsewhere_);
                  });
}

/// Returns whether ranks of this domain have said that they remove the set: a round that was
/// prepared now might end here alone.
bool DirectPath::is_being_removed(int process_set) const {
  const Unit* const removal = table().removal_of(process_set);
  return removal != nullptr && (removal->undecided || board_.rounds().arrivals(removal->id) > 0);
}

bool DirectPath::end_rounds(LeaderTree& tree) {
  if (!rounds_.has_promised()) return false;
  const auto complete = rounds_.complete();
  ended_.clear();
  for (const auto number : complete) ended_.push_back(find(number, *tree.key_of(number)));
  const auto together = [&](std::size_t i) {  // with the one before
    return parts_.config.fusion_threshold_bytes > 0 && i > 0 && i < ended_.size() &&
           ended_[i - 1] != nullptr && ended_[i] != nullptr &&
           share_batch(*ended_[i - 1], *ended_[i]);
  };
  for (std::size_t i = 0; i < complete.size(); ++i) {
    const auto number = complete[i];
    RepeatedOp* const op = ended_[i];
    if (op != nullptr && fast_path_.work().find_blocks(*op)) {
      if (op->leaders != nullptr)
        op->leaders->combine(op->traits, op->count, rounds_.contributions(number),
                             fast_path_.work().blocks(), op->parts);
      fast_path_.give_results(
          *op, company_of(together(i) ? 1 : 0, together(i) || together(i + 1) ? 2 : 1));
    }
    rounds_.end(number);
    tree.note_use(number);
  }
  return !complete.empty();
}

}  // namespace hvd
