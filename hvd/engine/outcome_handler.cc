#include "hvd/engine/outcome_handler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/progress/submitter.h"
#include "hvd/errors.h"
#include "hvd/routes.h"

namespace hvd {

namespace {

/// The verdict is made from what travels, where members of a group are numbers; this rank knows
/// their names.
Status with_names_of_members(const Status& status, const Submission& submission) {
  std::string text = status.text();
  for (std::size_t i = 0; i < submission.tensors.size(); ++i) {
    const std::string number = formatted("tensor {} is ", i);
    const std::string& name = submission.tensors[i].name;
    if (name.empty()) continue;
    for (auto at = text.find(number); at != std::string::npos;
         at = text.find(number, at + number.size() + name.size()))
      text.replace(at, number.size(), formatted("tensor '{}' is ", name));
  }
  return {status.code(), std::move(text)};
}

/// Notes how many rows come from each rank, which follows from what the ranks have said.
void note_rows(Entry& entry, const Unit& unit, std::size_t self) {
  if (unit.key.kind != OpKind::Allgather && unit.key.kind != OpKind::Alltoall) return;
  for (std::size_t i = 0; i < entry.submission.tensors.size(); ++i) {
    auto& rows = entry.rows.emplace_back();
    auto& before = entry.before.emplace_back();
    for (const auto& [places, signature] : unit.signatures.said()) {
      const TensorSignature& tensor = signature->tensors[i];
      const auto count = static_cast<std::size_t>(places.count);
      if (unit.key.kind == OpKind::Allgather) {
        rows.insert(rows.end(), count, tensor.shape.front());
      } else {
        const auto sent_before = tensor.splits.begin() + static_cast<std::ptrdiff_t>(self);
        rows.insert(rows.end(), count, tensor.splits.at(self));
        before.insert(before.end(), count,
                      std::accumulate(tensor.splits.begin(), sent_before, std::int64_t{0}));
      }
    }
  }
  entry.pending->rows = entry.rows;
}

}  // namespace

void OutcomeHandler::handle(Outcomes& outcomes, bool said_here) {
  if (said_here) wake_for(outcomes);
  for (const auto& agreed : outcomes.agreed) act_on_agreement(agreed);
  for (auto& batch : outcomes.batches) {
    const bool takes_part = log_.table().sets().info(batch.plan.process_set).rank >= 0 &&
                            !std::binary_search(batch.plan.absent.begin(), batch.plan.absent.end(),
                                                parts_.topology.rank);
    if (takes_part) runner_.enqueue(std::move(batch), ledger_);
  }
  for (const auto& voided : outcomes.voided)
    for (const auto& unit : voided.units) {
      Entry* const entry = ledger_.find(unit);
      if (entry == nullptr || !entry->announced || entry->state != EntryState::Waiting) continue;
      // A rank that was elsewhere has not counted it, and the ranks are to go on together.
      if (voided.status.code() == Status::Code::Deadlock && entry->unnamed)
        submitter_.fail(queue_.go_back(entry->key.process_set, entry->key.kind, *entry->unnamed),
                        voided.status);
      engine_.finish(*entry, voided.status);
    }
}

void OutcomeHandler::wake_for(const Outcomes& outcomes) {
  bool wake_waiters = !outcomes.left.empty() || outcomes.lingering != 0 || !outcomes.voided.empty();
  for (const auto& agreed : outcomes.agreed) {  // those that no batch will follow
    const auto& present = agreed.what.present;
    wake_waiters = wake_waiters || !agreed.verdict.ok() ||
                   std::find(present.begin(), present.end(), true) == present.end();
  }
  bool wake_workers = false;
  // Small batches need no help: whoever cut them runs them at once and rings when they are over.
  // Others wake who waits for a result anyway; threads that would take a core from the user's
  // computation only where there are cores to spare, or where the batch cannot be done without
  // them.
  for (const auto& cut : outcomes.batches) {
    const auto& set = log_.table().sets().info(cut.plan.process_set);
    const auto traits =
        traits_of(*cut.plan.signature, cut.plan.dtype, {cut.plan.signature->device, 0}, set);
    const Backend* const backend = parts_.backend_for(traits);
    const bool alone = backend != nullptr && backend->notifies();
    if (alone && routes::is_at_once(static_cast<std::size_t>(cut.plan.bytes))) continue;
    wake_waiters = true;
    wake_workers = wake_workers || !alone || parts_.topology.has_spare_core();
  }
  if (wake_waiters) mutex_.wake_waiters();
  if (wake_workers) mutex_.wake_all_workers();
}

void OutcomeHandler::act_on_agreement(const Outcomes::Agreed& agreed) {
  const Unit& unit = log_.table().unit(agreed.id);
  const auto& set = log_.table().sets().info(unit.key.process_set);
  const Agreement& what = agreed.what;
  if (set.rank < 0 ||
      std::binary_search(what.absent.begin(), what.absent.end(), parts_.topology.rank))
    return;
  Entry* const entry = ledger_.find(unit.ref());
  if (entry == nullptr)
    throw BackendError(
        formatted("'{}' was agreed, but this rank has not submitted it", unit.key.name));
  parts_.stats->add(parts_.stats->negotiation_rounds, 1);
  if (!agreed.verdict.ok())
    return engine_.finish(*entry, with_names_of_members(agreed.verdict, entry->submission));
  entry->state = advance(entry->state, EntryEvent::Agree);
  entry->agreed_at = Clock::now();
  entry->pending->present_anywhere = what.present;
  entry->pending->value = what.last;
  entry->unfinished =
      static_cast<std::size_t>(std::count(what.present.begin(), what.present.end(), true));
  if (entry->submission.tensors.empty()) entry->unfinished = 0;
  entry->unqueued = entry->unfinished;
  note_rows(*entry, unit, static_cast<std::size_t>(set.rank));
  if (unit.key.kind == OpKind::Join) queue_.start_again(unit.key.process_set);
  if (entry->trace != 0)
    parts_.timeline->agreed(entry->trace, unit.key.kind == OpKind::Control ? -1 : what.last,
                            entry->unfinished > 0);
  const bool removed = unit.key.kind == OpKind::Control && !log_.table().sets().has(what.last);
  if (entry->unfinished == 0) engine_.finish(*entry, {});
  if (!removed) return;
  cutter_.forget(what.last);
  queue_.forget_set(what.last);
  static_cast<void>(fast_path_.ops().drop_set(what.last));
  for (Entry* other : ledger_.all())
    if (other->key.process_set == what.last && other->announced &&
        other->state == EntryState::Waiting)
      engine_.finish(*other, {Status::Code::InvalidArgument, removed_text(other->key)});
}

bool OutcomeHandler::uses(int process_set) {
  bool used = queue_.contains_set(process_set) || !fast_path_.ops().drop_set(process_set);
  ledger_.for_each(
      [&](const Entry& entry) { used = used || entry.key.process_set == process_set; });
  return used;
}

}  // namespace hvd
