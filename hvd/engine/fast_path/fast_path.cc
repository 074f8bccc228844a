#include "hvd/engine/fast_path/fast_path.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

namespace hvd {

namespace {

constexpr unsigned kLooksAtResult = 64;  // before one at the arrivals: about 2 us
// where ranks share cores, and give way between looks
constexpr unsigned kLooksAtResultSharing = 4;

}  // namespace

FastPath::FastPath(const EngineParts& parts, NegotiationLog& log, Ledger& ledger,
                   SubmissionQueue& queue, EngineMutex& mutex, Burst& burst, EngineEvents& engine)
    : parts_(parts),
      log_(log),
      ledger_(ledger),
      queue_(queue),
      mutex_(mutex),
      burst_(burst),
      engine_(engine),
      board_(*parts.board),
      factory_(parts, log, ledger),
      work_(parts, log),
      short_wait_(parts.topology.has_core()),
      looks_at_result_(parts.topology.has_core() ? kLooksAtResult : kLooksAtResultSharing),
      most_batch_bytes_(static_cast<std::size_t>(
          std::min<std::int64_t>(limit(Limit::AtOnceBytes), parts.config.fusion_threshold_bytes))) {
  for (auto* list : {&arrived_, &complete_, &claimed_})
    list->reserve(SubmissionQueue::kUnnamedNames);
  negotiated_.reserve(SubmissionQueue::kUnnamedNames);
}

// ----------------------------------------------------------------------------------------- running

bool FastPath::is_ready(RepeatedOp& op) {
  if (op.place.entry.empty() || !work_.is_valid(op)) return false;
  if (op.memory != nullptr && !op.is_pulled() && !op.memory->is_free(op.location)) return false;
  return ledger_.empty() || ledger_.find(op.key) == nullptr;
}

bool FastPath::is_unseen(const RepeatedOp& op) {
  constexpr long kOwn = 2;  // its own, and its entry's
  if (op.in_use.load(std::memory_order_acquire)) return true;
  return op.is_handed_out && !op.pending->waited_for.load(std::memory_order_relaxed) &&
         op.pending.use_count() > kOwn;
}

bool FastPath::is_unseen(const UnitKey& key) const {
  const auto op = factory_.ops().find(key.process_set, key.kind, key.name);
  return op != nullptr && !is_unnamed(key.name) && is_unseen(*op);
}

void FastPath::begin(RepeatedOp& op, const SmallCall& call) {
  if (std::exchange(op.is_handed_out, false))
    op.place.entry.mapped()->pending = op.pending = std::make_shared<HandleState>();
  op.input = call.input;
  op.output = call.output;
  for (std::size_t i = 0; i < op.group.size(); ++i) {
    op.group[i].input = call.group[i].input;
    op.group[i].output = call.group[i].output;
  }
  op.allocate = call.allocate;
  op.context = call.context;
  op.is_to_fetch = op.is_alike = false;
  op.is_in_place = op.is_direct() && board_.ranks() == 1 && call.kind == OpKind::Allreduce &&
                   op.group.empty() && op.output != nullptr;
  HandleState& pending = *op.pending;
  pending.done.store(false, std::memory_order_relaxed);
  pending.waited_for.store(false, std::memory_order_relaxed);
  pending.status = {};
  if (!op.is_in_place) fill_block(op);
}

/// Copies the input to the block, also where inline data is enough: another rank may negotiate the
/// operation.
void FastPath::fill_block(RepeatedOp& op) const {
  if (op.input_bytes == 0 ||
      (op.traits.kind == OpKind::Broadcast && op.traits.root != parts_.topology.rank))
    return;
  for (const auto& member : op.group)
    if (member.bytes > 0) std::memcpy(op.block + member.at, member.input, member.bytes);
  if (op.group.empty()) std::memcpy(op.block, op.input, op.input_bytes);
  if (op.note != nullptr)
    std::memcpy(op.note, op.group.empty() ? op.input : op.block, op.input_bytes);
}

std::shared_ptr<HandleState> FastPath::start_unowned(const SmallCall& call,
                                                     std::shared_ptr<void> owner) {
  const auto op = start(call, false);
  if (!op) return nullptr;
  op->is_handed_out = true;
  op->pending->present_anywhere.assign(std::max<std::size_t>(1, op->group.size()), true);
  if (op->pending->done.load()) {
    op->in_use.store(false);
    mutex_.destroy(std::move(owner));
  } else {
    static char nothing = 0;
    abandon(*op,
            owner ? std::move(owner) : std::shared_ptr<void>(std::shared_ptr<void>(), &nothing));
  }
  return op->pending;
}

std::shared_ptr<RepeatedOp> FastPath::start(const SmallCall& call, bool waits) {
  if (factory_.ops().size() == 0) return nullptr;
  const bool gathers = !waits && burst_.fast() > 0;
  std::shared_ptr<RepeatedOp> op;
  bool is_ours = false;
  try {
    log_.read();
    if (waits && burst_.has_complete()) end_complete();
    if (call.known != nullptr) op = call.known->lock();
    const bool known = op != nullptr;
    if (!known) {
      std::string_view name = call.name;
      std::array<char, kUnnamedText> text{};
      if (name.empty() || is_library_name(name)) {
        if (!queue_.empty()) return nullptr;
        name = queue_.find_name(call.process_set, call.kind, name, text);
        if (name.empty()) return nullptr;
      }
      op = factory_.ops().find(call.process_set, call.kind, name);
    }
    if (op && op->owner) end_complete();  // it may have ended, and nobody has looked
    if (!op || op->in_use.load(std::memory_order_acquire) || (!call.name.empty() && is_unseen(*op)))
      return nullptr;
    // whoever else would says so under the engine's mutex
    op->in_use.store(true, std::memory_order_relaxed);
    is_ours = true;
    op->unnamed = call.name.empty() ? queue_.next_place(call.process_set, call.kind) : std::nullopt;
    board_.rounds().prepare_arrival(op->unit.id);
    bool arrived = false;
    const bool is_too_large =
        gathers && op->is_direct() &&
        op->input_bytes * static_cast<std::size_t>(parts_.topology.domains - 1) >
            limit(Limit::DirectBurstBytes);
    if (!is_too_large && (known || op->fits(call)) && is_ready(*op) &&
        (!op->is_pulled() || work_.pulled().begin(*op))) {
      begin(*op, call);
      arrived = arrive(*op, gathers);
    }
    if (!arrived) {
      if (op->is_pulled()) work_.pulled().end(*op, false);
      op->in_use.store(false);
      if (known) call.known->reset();  // another may have taken its place
      return nullptr;
    }
    if (call.known != nullptr && !known) *call.known = op;
    if (call.name.empty()) queue_.use_name(call.process_set, call.kind);
  } catch (...) {
    board_.set_failure(status_of_current_exception());
    if (!is_ours) return nullptr;
    if (op->state == RepeatedOp::State::Idle && !op->pending->done) {  // it had not arrived yet
      op->in_use.store(false);
      return nullptr;
    }
  }
  if (!waits) burst_.add_fast();
  auto& stats = parts_.stats->fast_path;
  stats.add(stats.tensors_submitted,
            call.kind == OpKind::Barrier ? 0 : std::max<std::size_t>(1, op->group.size()));
  return op;
}

/// Returns false if the unit was evicted meanwhile.
bool FastPath::arrive(RepeatedOp& op, bool gathers) {
  board_.rounds().set_location(op.unit.id, op.location);
  for (std::uint32_t i = 1; i < op.group.size(); ++i)
    board_.rounds().keep_location(op.unit.id + i, op.location + op.group[i].at);
  if (!op.is_direct() && !gathers && arrive_last(op)) return true;
  const std::uint32_t arrived = board_.rounds().arrive(op.unit.id, op.unit.generation);
  if (arrived == 0) return false;
  op.state = RepeatedOp::State::Arrived;
  arrived_.push_back(&op);
  if (op.is_direct()) direct_ops_.push_back(&op);
  log_.read();  // which may end it
  if (op.state == RepeatedOp::State::Idle) return true;
  const bool is_last = arrived == op.indices.size();
  const bool can_run = is_last && work_.is_possible(op);
  if (can_run && gathers) {  // any of them can end it
    gather(op);
    return true;
  }
  if (can_run && op.is_direct()) {
    // it goes on from here
    if (parts_.topology.domain_index != 0 && !board_.bells().leader_looks()) mutex_.wake_leader();
    return true;
  }
  if (can_run && !op.is_direct() && work_.claim(op)) {
    run_for_all(op);
    return true;
  }
  // A rank that has joined or left meanwhile may have looked here before this one arrived, but then
  // its record has been read just now.
  if (is_last || !work_.is_valid(op)) engine_.arrived(adopt(op), arrived);
  return true;
}

Entry& FastPath::adopt(RepeatedOp& op) {
  if (op.state == RepeatedOp::State::Adopted) return *ledger_.find(op.unit);
  if (!ledger_.put_back(op.place))
    throw std::logic_error("the fast path: an operation under a name that is in flight");
  op.state = RepeatedOp::State::Adopted;
  Entry& entry = *ledger_.find(op.unit);
  entry.state = EntryState::Waiting;
  entry.unfinished = 0;
  entry.unnamed = op.unnamed;
  entry.prepared.assign(entry.prepared.size(), true);
  entry.rows.clear();
  entry.before.clear();
  entry.since = entry.reported = Clock::now();
  if (op.is_pulled()) entry.locations.front() = op.location;
  for (std::size_t i = 0; i < op.group.size(); ++i) {
    entry.submission.tensors[i].input = op.group[i].input;
    entry.submission.tensors[i].output = op.group[i].output;
  }
  if (op.group.empty() && !entry.submission.tensors.empty()) {
    entry.submission.tensors.front().input = op.input;
    entry.submission.tensors.front().output = op.output;
  }
  return entry;
}

void FastPath::adopt_all() {
  for (RepeatedOp* op : arrived_)
    if (op->state == RepeatedOp::State::Arrived) adopt(*op);
}

bool FastPath::await(const RepeatedOp::Awaited& round, const HandleState& pending) {
  // A complete round is left for a while to who arrived last: that one ends it with others that it
  // is about to arrive in. Nor is the line read on which the ranks arrive.
  bool is_there = false;
  unsigned looks = 0;
  static_cast<void>(short_wait_.until([&] {
    is_there =
        board_.rounds().has_result(round.slot) ||
        (++looks % looks_at_result_ == 0 && board_.rounds().is_to_claim(round.slot, round.ranks));
    return is_there || pending.done.load(std::memory_order_relaxed);
  }));
  return is_there;
}

// ------------------------------------------------------------------------------ rounds that gather

/// The round is complete, and is ended with what comes after it: by a rank that waits for it, or by
/// this one. Who has fallen asleep over it is not woken for each.
void FastPath::gather(const RepeatedOp& op) {
  burst_.set_complete(true);
  if (has_called_help_ || !(op.is_direct() || board_.bells().has_watchers())) return;
  has_called_help_ = true;
  mutex_.wake_worker();
}

/// Returns whether the operation waits for its round to end.
bool FastPath::is_waiting(const RepeatedOp& op) const {
  return op.state == RepeatedOp::State::Arrived ||
         ledger_.find(op.unit)->state == EntryState::Waiting;
}

const RepeatedOp* FastPath::find(const HandleState& pending) const {
  const auto found = std::ranges::find_if(
      arrived_, [&](const RepeatedOp* op) { return op->pending.get() == &pending; });
  return found == arrived_.end() ? nullptr : *found;
}

bool FastPath::has_complete() const {
  for (const RepeatedOp* op : arrived_) {
    if (board_.rounds().has_result(op->unit.id)) return true;
    if (!op->is_direct() && board_.rounds().is_to_claim(op->unit.id, op->indices.size()) &&
        is_waiting(*op))
      return true;
  }
  return false;
}

void FastPath::end_complete() {
  burst_.set_complete(false);
  has_called_help_ = false;
  if (arrived_.empty()) return;
  log_.read();
  complete_.clear();
  negotiated_.clear();
  bool is_leaders = false;
  for (RepeatedOp* op : arrived_) {
    if (!board_.rounds().is_to_claim(op->unit.id, op->indices.size()) || !is_waiting(*op)) continue;
    if (!op->is_direct()) {
      complete_.push_back(op);
    } else if (work_.is_possible(*op)) {
      is_leaders = is_leaders || !board_.rounds().is_promised(op->unit.id);
    } else {
      negotiated_.push_back(op->unit);  // the leader may have negotiated it, and not know of it
    }
  }
  if (is_leaders && parts_.topology.domain_index != 0 && !board_.bells().leader_looks())
    mutex_.wake_leader();
  // Where several ranks do this at a time, each begins elsewhere.
  const std::size_t own = complete_.size() * static_cast<std::size_t>(board_.self()) /
                          static_cast<std::size_t>(board_.ranks());
  std::rotate(complete_.begin(), complete_.begin() + static_cast<std::ptrdiff_t>(own),
              complete_.end());
  for (std::size_t next = 0; next < complete_.size();) next = end_batch(next);
  if (!complete_.empty()) mutex_.wake_watchers();
  take_results();
  for (const auto& unit : negotiated_) {
    const auto op = std::ranges::find_if(
        arrived_, [&](const RepeatedOp* other) { return other->unit == unit; });
    if (op != arrived_.end() && is_waiting(**op)) take_long_way(**op);
  }
}

/// Claims complete rounds, from `first` on, up to a batch's worth, and ends them. Returns the first
/// that is left.
std::size_t FastPath::end_batch(std::size_t first) {
  claimed_.clear();
  std::size_t bytes = 0;
  std::size_t next = first;
  for (; next < complete_.size(); ++next) {
    RepeatedOp& op = *complete_[next];
    if (!claimed_.empty() &&
        (most_batch_bytes_ == 0 || bytes + op.input_bytes > most_batch_bytes_ ||
         !share_batch(*claimed_.front(), op)))
      break;
    if (!work_.is_possible(op)) {
      negotiated_.push_back(op.unit);
    } else if (work_.claim(op)) {
      claimed_.push_back(&op);
      bytes += op.input_bytes;
    }
  }
  for (std::size_t i = 0; i < claimed_.size(); ++i) {
    RepeatedOp& op = *claimed_[i];
    work_.find_blocks(op);  // the last that were found are another's
    work_.run(op);
    work_.end(op, company_of(i, claimed_.size()));
  }
  return next;
}

/// Arrives, claims the round and ends it in one step, if all others have arrived; returns false
/// otherwise. What one of them says between the look at the log and the claim, it says of a round
/// that it has arrived in, and finds ended.
bool FastPath::arrive_last(RepeatedOp& op) {
  if (!board_.rounds().expect_to_be_last(op.unit.id, op.indices) || !work_.is_possible(op))
    return false;
  if (!board_.rounds().arrive_last(op.unit.id, op.unit.generation,
                                   static_cast<std::uint32_t>(op.indices.size())))
    return false;
  op.state = RepeatedOp::State::Arrived;
  arrived_.push_back(&op);
  run_for_all(op);
  return true;
}

void FastPath::run_for_all(RepeatedOp& op) {
  work_.run(op);
  tell_results(op, Rounds::Company::Alone);
}

void FastPath::give_results(RepeatedOp& op, Rounds::Company company) {
  // Nobody else ends what is prepared.
  if (!work_.claim(op))
    throw std::logic_error("the fast path: a prepared round that another has ended");
  tell_results(op, company);
}

void FastPath::take_long_way(RepeatedOp& op) {
  engine_.arrived(adopt(op), static_cast<std::uint32_t>(op.indices.size()));
}

void FastPath::tell_results(RepeatedOp& op, Rounds::Company company) {
  work_.end(op, company);
  const bool is_pulled = op.is_pulled();
  if (is_pulled) mutex_.wake_watchers();  // they work at the same time as this rank
  take_result(op);
  if (!is_pulled) mutex_.wake_watchers();
}

void FastPath::take_results() {
  for (std::size_t i = 0; i < arrived_.size();) {
    RepeatedOp& op = *arrived_[i];
    if (board_.rounds().has_result(op.unit.id) && is_waiting(op)) {
      take_result(op);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void FastPath::take_result(RepeatedOp& op) {
  op.is_alike = true;
  if (op.is_pulled()) work_.pulled().find_sources(op);
  // from here on the note may be another operation's
  const auto company = board_.rounds().take_result(op.unit.id);
  const bool is_source =
      op.traits.kind == OpKind::Broadcast && op.traits.root == parts_.topology.rank;
  const bool is_there =
      op.memory == nullptr || op.is_in_place || (is_source && op.input == op.output);
  op.is_to_fetch = !is_there && op.output == nullptr && op.allocate != nullptr;
  if (op.is_pulled()) {
    if (!op.is_to_fetch) PulledRounds::pull(op, is_there ? nullptr : op.output);
  } else if (!is_there) {
    RoundWork::copy_result(op);
  }
  auto& stats = parts_.stats->fast_path;
  stats.add(stats.negotiation_rounds, 1);
  stats.add(stats.routes[static_cast<std::size_t>(op.route)], 1);
  if (op.is_pulled()) stats.add(stats.accesses[static_cast<std::size_t>(Access::Lent)], 1);
  if (op.memory != nullptr && company != Rounds::Company::Rest) stats.add(stats.batches_run, 1);
  if (op.memory != nullptr && company != Rounds::Company::Alone)
    stats.add(stats.tensors_fused, std::max<std::size_t>(1, op.group.size()));
  if (op.memory != nullptr && reduces(op.traits.kind))
    stats.add(stats.bytes_reduced, op.input_bytes);
  if (op.state == RepeatedOp::State::Adopted) {
    Entry& entry = *ledger_.find(op.unit);
    entry.state = advance(entry.state, EntryEvent::Agree);
    return engine_.finish(entry, {});
  }
  ended(op);
  op.pending->done.store(true, std::memory_order_release);
  let_go(op);
  mutex_.continuations().post(*op.pending);
  mutex_.wake_own_threads();
  if (queue_.empty()) return;
  mutex_.wake_waiters();  // whoever drives next has something to announce
  mutex_.wake_worker();
}

void FastPath::fetch(RepeatedOp& op, const SmallCall& call) {
  if (op.is_alike) {
    std::fill(call.received.begin(), call.received.end(),
              op.result_rows / static_cast<std::int64_t>(op.set->ranks.size()));
  } else if (!call.received.empty()) {
    std::copy_n(op.pending->rows.at(0).begin(), call.received.size(), call.received.begin());
  }
  if (!std::exchange(op.is_to_fetch, false)) return;
  if (op.is_pulled()) {
    // Whatever becomes of it here, the others' blocks are theirs again.
    struct Reading {
      RepeatedOp& op;
      ~Reading() { PulledRounds::let_go(op); }
    } const reading{op};
    return PulledRounds::pull(op, op.allocate(op.context, op.result_rows));
  }
  void* const output = op.allocate(op.context, op.result_rows);
  if (op.result_bytes > 0) std::memcpy(output, op.block + op.result_at, op.result_bytes);
}

bool FastPath::end(Entry& entry, bool failed) {
  RepeatedOp& op = *entry.op;
  // Asked before the result: a round that ends in between has one.
  const bool is_open =
      failed && op.is_pulled() && board_.rounds().has_arrived(entry.unit.id, board_.self());
  if (failed && board_.rounds().has_result(entry.unit.id) && entry.state == EntryState::Waiting) {
    take_result(op);  // it was done before that
    return false;
  }
  if (op.is_pulled()) work_.pulled().end(op, is_open);
  ended(op);
  let_go(op);
  return true;
}

void FastPath::ended(RepeatedOp& op) {
  op.state = RepeatedOp::State::Idle;
  std::erase(arrived_, &op);
  if (op.is_direct()) std::erase(direct_ops_, &op);
}

/// Lets go of an operation that has ended, if its caller does not take the result.
void FastPath::let_go(RepeatedOp& op) {
  if (!op.owner) return;
  if (!mutex_.continuations().keep(*op.pending, op.owner)) mutex_.destroy(std::move(op.owner));
  op.in_use.store(false);
}

}  // namespace hvd
