// The log: what the ranks have said, and what follows from it.
#include <algorithm>
#include <numeric>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

constexpr std::uint32_t kMaxOpenBatches = 1;  // more would start batches that could have been fused

/// The verdict is made from what travels, where members of a group are numbers; this rank knows their names.
Status with_names_of_members(const Status& status, const Submission& submission) {
  std::string text = status.text();
  for (std::size_t i = 0; i < submission.tensors.size(); ++i) {
    const std::string number = formatted("tensor {} is ", i);
    const std::string& name = submission.tensors[i].name;
    if (name.empty()) continue;
    for (auto at = text.find(number); at != std::string::npos; at = text.find(number, at + number.size() + name.size()))
      text.replace(at, number.size(), formatted("tensor '{}' is ", name));
  }
  return {status.code(), std::move(text)};
}

}  // namespace

void Engine::with_log(std::size_t bytes, const std::function<void()>& append) {
  while (true) {
    {
      const BoardLock lock(board_);
      read_log();
      if (board_.has_room(bytes)) return append();
    }
    if (board_.failed()) throw BackendError("the world has failed");
    nudge_readers();  // somebody has not read for a long time: the log is some thousand records long
  }
}

void Engine::commit(const Bytes& record) {
  Outcomes outcomes;
  negotiator_.apply(record, board_.tail() + sizeof(std::uint32_t) + record.size(), outcomes);
  for (const auto& batch : outcomes.batches)
    if (negotiator_.local_participants(batch.plan) > 0) board_.open_batch(batch.sequence, batch.scope == Scope::Domain);
  for (const auto& dropped : outcomes.dropped) board_.void_slot(dropped.id, dropped.slots);
  board_.append(record);
  ring_after(outcomes);
  act(outcomes);
}

void Engine::read_log() {
  // One record at a time: what an agreement or a cut means is what the table says just then, and a slot's locations may be
  // overwritten once all ranks have read past the cut.
  while (auto record = board_.read_next()) {
    Outcomes outcomes;
    negotiator_.apply(*record, board_.read_position(), outcomes);
    if (!outcomes.empty()) act(outcomes);
  }
}

void Engine::cut_if_idle() {
  while (negotiator_.has_agreed(Scope::Domain) && board_.open_batches() < kMaxOpenBatches) {
    if (!board_.can_open(negotiator_.next_sequence(), kDataTypes)) {
      board_.ring_all_workers();  // a rank has not looked at its results for a long time; whoever departs last cuts
      return;
    }
    commit(Negotiator::cut_record(Scope::Domain));
  }
}

void Engine::ring_after(const Outcomes& outcomes) {
  bool wake_waiters = !outcomes.left.empty() || !outcomes.voided.empty();
  for (const auto& agreed : outcomes.agreed) {  // those that no batch will follow
    const auto& present = agreed.what.present;
    wake_waiters = wake_waiters || !agreed.verdict.ok() || std::find(present.begin(), present.end(), true) == present.end();
  }
  bool wake_workers = false;
  // Small batches need no help: whoever cut them runs them at once and rings when they are over. Others wake who waits for a
  // result anyway; threads that would take a core from the user's computation only where there are cores to spare, or where the
  // batch cannot be done without them.
  for (const auto& cut : outcomes.batches) {
    const auto& set = negotiator_.process_set(cut.plan.process_set);
    const auto traits = traits_of(*cut.plan.signature, cut.plan.dtype, {cut.plan.signature->device, 0}, set);
    const Backend* const backend = backend_for(traits);
    const bool alone = backend != nullptr && backend->any_rank_finishes(traits, cut.plan.bytes);
    if (alone && cut.plan.bytes <= kSmallBatchBytes) continue;
    wake_waiters = true;
    wake_workers = wake_workers || !alone || spare_cores_;
  }
  if (wake_waiters) board_.ring_waiters();
  if (wake_workers) board_.ring_all_workers();
}

void Engine::act(Outcomes& outcomes) {
  for (const auto& agreed : outcomes.agreed) act_on_agreement(agreed);
  for (auto& batch : outcomes.batches) enqueue(std::move(batch));
  somebody_left_ = somebody_left_ || !outcomes.left.empty();
  for (const auto& voided : outcomes.voided)
    for (const auto id : voided.ids)
      if (Entry* entry = ledger_.find(id); entry != nullptr && entry->announced && entry->state == EntryState::Waiting)
        finish_entry(*entry, voided.status);
  if (leader_tree_) note_news(outcomes);
}

void Engine::note_news(const Outcomes& outcomes) {
  // Spelled out now: by the time the relay passes it on, the id may stand for another tensor.
  for (const auto& [id, run] : outcomes.introduced) {
    const Unit& unit = negotiator_.unit(id);
    if (unit.scope != Scope::World || !is_here(run.first)) continue;  // a rank of this domain speaks for itself alone
    const auto& ranks = negotiator_.process_set(unit.key.process_set).ranks;
    const auto place = static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), run.first) - ranks.begin());
    local_events_.push_back({LocalEvent::Kind::Introduced, unit.key, run.first, unit.signatures.of(place)});
  }
  for (const auto& [id, what] : outcomes.host_ready)
    local_events_.push_back({LocalEvent::Kind::Ready, negotiator_.unit(id).key, -1, nullptr, what});
  for (const auto& [set, rank] : outcomes.joined)
    if (is_here(rank)) local_events_.push_back({LocalEvent::Kind::Joined, {set, OpKind::Join, {}}, rank});
  for (const int rank : outcomes.left)
    if (is_here(rank)) {
      local_events_.push_back({LocalEvent::Kind::Left, {}, rank});
      local_events_.back().pledges = outcomes.pledges;
    }
  for (const auto id : outcomes.doubted) local_events_.push_back({LocalEvent::Kind::Doubted, negotiator_.unit(id).key});
  for (const auto& agreed : outcomes.agreed)
    if (const auto& key = negotiator_.unit(agreed.id).key;
        key.kind == OpKind::Control && key.name == kRemoveProcessSet && agreed.verdict.ok())
      local_events_.push_back({LocalEvent::Kind::Removed, {agreed.what.last, OpKind::Control, {}}});
}

void Engine::act_on_agreement(const Outcomes::Agreed& agreed) {
  const Unit& unit = negotiator_.unit(agreed.id);
  if (negotiator_.process_set(unit.key.process_set).rank < 0) return;
  const Agreement& what = agreed.what;
  if (std::binary_search(what.absent.begin(), what.absent.end(), parts_.topology.rank)) return;
  Entry* entry = ledger_.find(agreed.id);
  if (entry == nullptr) throw BackendError(formatted("'{}' was agreed, but this rank has not submitted it", unit.key.name));
  parts_.stats->add(parts_.stats->negotiation_rounds, 1);
  if (!agreed.verdict.ok()) return finish_entry(*entry, with_names_of_members(agreed.verdict, entry->submission));
  entry->state = advance(entry->state, EntryEvent::Agree);
  entry->pending->present_anywhere = what.present;
  entry->pending->value = what.last;
  entry->unfinished = static_cast<std::size_t>(std::count(what.present.begin(), what.present.end(), true));
  if (entry->submission.tensors.empty()) entry->unfinished = 0;
  entry->unqueued = entry->unfinished;
  note_rows(*entry, unit);
  if (unit.key.kind == OpKind::Join) {
    ++joins_[unit.key.process_set];
    std::erase_if(unnamed_, [&](const auto& next) { return next.first.first == unit.key.process_set; });
  }
  if (entry->trace != 0) timeline().agreed(entry->trace, unit.key.kind == OpKind::Control ? -1 : what.last, entry->unfinished > 0);
  const bool removed = unit.key.kind == OpKind::Control && !negotiator_.has_process_set(what.last);
  if (entry->unfinished == 0) finish_entry(*entry, {});
  if (!removed) return;
  joins_.erase(what.last);
  std::erase_if(unnamed_, [&](const auto& next) { return next.first.first == what.last; });
  while (const auto* key =
             persistent_ops_.find_if([&](const PersistentOp& op) { return !op.in_use.load() && op.process_set == what.last; }))
    drop_persistent(UnitKey(*key));
  for (Entry* other : ledger_.all())
    if (other->key.process_set == what.last && other->announced && other->state == EntryState::Waiting)
      finish_entry(*other, {Status::Code::InvalidArgument, removed_text(other->key)});
}

void Engine::note_rows(Entry& entry, const Unit& unit) {
  if (unit.key.kind != OpKind::Allgather && unit.key.kind != OpKind::Alltoall) return;
  const auto self = static_cast<std::size_t>(negotiator_.process_set(unit.key.process_set).rank);
  for (std::size_t i = 0; i < entry.submission.tensors.size(); ++i) {
    auto& rows = entry.rows.emplace_back();
    auto& before = entry.before.emplace_back();
    for (const auto& [places, signature] : unit.signatures.said()) {
      const TensorSignature& tensor = signature->tensors[i];
      const auto count = static_cast<std::size_t>(places.count);
      if (unit.key.kind == OpKind::Allgather) {
        rows.insert(rows.end(), count, tensor.shape.front());
      } else {
        rows.insert(rows.end(), count, tensor.splits.at(self));
        before.insert(before.end(), count,
                      std::accumulate(tensor.splits.begin(), tensor.splits.begin() + static_cast<std::ptrdiff_t>(self), std::int64_t{0}));
      }
    }
  }
  entry.pending->rows = entry.rows;
}

void Engine::enqueue(CutBatch cut) {
  if (negotiator_.process_set(cut.plan.process_set).rank < 0) return;
  if (std::binary_search(cut.plan.absent.begin(), cut.plan.absent.end(), parts_.topology.rank)) return;
  if (timeline().on()) timeline().cut(cut.plan.tensors.size(), cut.plan.bytes);
  Prepared batch{std::move(cut), {}, {}};
  for (const auto& planned : batch.cut.plan.tensors) {
    Entry* entry = ledger_.find(planned.unit);
    if (entry == nullptr) throw BackendError("a batch with a tensor that this rank has not submitted");
    batch.entries.push_back(entry);
    auto& locations = batch.locations.emplace_back();
    for (int rank = 0; rank < board_.ranks(); ++rank) locations.push_back(board_.location(planned.unit + planned.index, rank) & ~kAbsent);
  }
  to_launch_.push_back(std::move(batch));
}

std::vector<Pledge> Engine::pledges() const {
  std::map<std::uint32_t, std::uint32_t> rounds;
  for (const auto& [key, waiting] : later_)
    if (const Unit* unit = negotiator_.find(key)) rounds[unit->id] += static_cast<std::uint32_t>(waiting.size());
  // A round of the fast path ends without a record, so its arrival is not counted: who looks for it finds it on the board.
  ledger_.for_each([&](const Entry& entry) {
    const bool waits = entry.state == EntryState::Waiting && entry.announced && entry.op == nullptr;
    if (waits && board_.has_arrived(entry.unit, board_.self())) ++rounds[entry.unit];
  });
  std::vector<Pledge> pledges;
  for (const auto& [id, count] : rounds) pledges.push_back({id, count});
  return pledges;
}

void Engine::doubt(std::uint32_t id) {
  for (bool unread = true; unread;) {
    with_log(64, [&] {
      unread = false;
      const Entry* const entry = ledger_.find(id);
      if (entry == nullptr || entry->state != EntryState::Waiting || !entry->announced || !negotiator_.knows(id)) return;
      const Unit& unit = negotiator_.unit(id);
      const auto leavers = negotiator_.leavers_of(unit);
      if (leavers.empty()) return;
      if (unit.scope == Scope::World) return commit(Negotiator::doubt(id));
      const auto& domain = parts_.topology.domain_ranks;
      const auto never_comes = [&](int rank) {
        const auto index = std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin();
        return !board_.has_arrived(id, static_cast<int>(index)) && !negotiator_.has_pledged(rank, unit.key);
      };
      const auto blocks = std::find_if(leavers.begin(), leavers.end(), never_comes);
      if (blocks == leavers.end()) return;
      unread = unit.cut_at > board_.slowest_reader();  // who has not read the last cut still needs the slots' words
      if (unread) return;
      board_.void_slot(id, unit.slots);
      commit(Negotiator::refusal(id, *blocks));
    });
    if (unread && board_.failed()) return;
    if (unread) nudge_readers();
  }
}

void Engine::doubt_all() {
  std::vector<std::uint32_t> waiting;
  ledger_.for_each([&](const Entry& entry) {
    if (entry.announced && entry.state == EntryState::Waiting) waiting.push_back(entry.unit);
  });
  for (const auto id : waiting) doubt(id);
}

void Engine::refuse_by_root(const UnitKey& key, int left_rank) {
  for (bool unread = true; unread;) {
    with_log(64, [&] {
      unread = false;
      const Unit* unit = negotiator_.find(key);
      if (unit != nullptr && unit->queued) return;  // nobody here waits for it any more
      unread = unit != nullptr && unit->cut_at > board_.slowest_reader();
      if (unread) return;
      if (unit != nullptr) {
        board_.void_slot(unit->id, unit->slots);
        commit(Negotiator::refusal(unit->id, left_rank));
      }
      // What this domain was ready for, and has not said yet, is void too.
      std::erase_if(local_events_, [&](const LocalEvent& event) { return event.kind == LocalEvent::Kind::Ready && event.key == key; });
    });
    if (unread && board_.failed()) return;
    if (unread) nudge_readers();
  }
}

}  // namespace hvd
