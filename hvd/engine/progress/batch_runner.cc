#include "hvd/engine/progress/batch_runner.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <numeric>

#include "hvd/base/log.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

/// One that the device is at work on, and one behind it. More: what is agreed meanwhile travels in
/// smaller batches.
constexpr std::ptrdiff_t kEnqueuedOfASet = 2;
constexpr std::size_t kMostTold = 4096;  // names of which the log has said which way they take

}  // namespace

void BatchRunner::enqueue(CutBatch cut, Ledger& ledger) {
  if (parts_.timeline->on()) parts_.timeline->cut(cut.plan.tensors.size(), cut.plan.bytes);
  const Board& board = *parts_.board;
  Prepared batch{std::move(cut), {}, {}};
  for (const auto& planned : batch.cut.plan.tensors) {
    Entry* entry = ledger.find(table_.unit(planned.unit).ref());
    if (entry == nullptr)
      throw BackendError("a batch with a tensor that this rank has not submitted");
    batch.entries.push_back(entry);
    auto& locations = batch.locations.emplace_back();
    for (int rank = 0; rank < board.ranks(); ++rank)
      locations.push_back(board.rounds().location(planned.unit + planned.index, rank) & ~kAbsent);
  }
  queued_.push_back(std::move(batch));
}

bool BatchRunner::has_only_small_ones() const {
  return std::all_of(queued_.begin(), queued_.end(), [](const Prepared& batch) {
    return routes::is_at_once(static_cast<std::size_t>(batch.cut.plan.bytes));
  });
}

bool BatchRunner::run(const Turn& /*turn*/, std::vector<Prepared> queued) {
  if (running_.empty() && queued.empty())
    for (const auto& backend : parts_.backends) backend->look_again();
  bool progressed = !queued.empty();
  for (auto& batch : queued) launch(std::move(batch));
  for (auto& running : running_) {
    const Progress progress = running.execution->advance();
    progressed = progressed || progress != Progress::Idle;
    if (!running.handed_over && running.execution->is_enqueued()) hand_over(running);
    if (progress == Progress::Done) finish(running);
  }
  std::erase_if(running_, [](const Running& running) { return running.over; });
  return retire_enqueued() || progressed;
}

void keep_for_ever(std::shared_ptr<void> owner) noexcept {
  static std::mutex mutex;
  // never destroyed: the device does not end before the process
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(owner));
}

bool BatchRunner::abort(const Turn& /*turn*/) noexcept {
  bool rests = true;
  for (const auto& backend : parts_.backends) rests = backend->abort() && rests;
  if (!rests)
    for (auto& running : running_) keep_for_ever(std::move(running.execution));
  running_.clear();
  return rests;
}

bool BatchRunner::uses(const Turn& /*turn*/, int process_set) const {
  const auto is_of_set = [&](const Prepared& batch) {
    return batch.cut.plan.process_set == process_set;
  };
  return std::any_of(queued_.begin(), queued_.end(), is_of_set) ||
         std::any_of(running_.begin(), running_.end(),
                     [&](const Running& running) { return is_of_set(running.batch); });
}

Polling BatchRunner::polling(const Turn& /*turn*/) const {
  Polling polling = Polling::None;
  for (const Running& running : running_) {
    if (running.backend->notifies()) continue;
    // the next batch of its set waits for the device
    if (running.handed_over && !running.retired) return Polling::Urgent;
    if (!running.execution->is_rung()) polling = Polling::Needed;
  }
  return polling;
}

BatchMember BatchRunner::make_member(const Prepared& prepared, std::size_t index) const {
  const Entry& entry = *prepared.entries[index];
  const std::uint32_t place = prepared.cut.plan.tensors[index].index;
  const TensorArgument& tensor = entry.submission.tensors[place];
  BatchMember member;
  member.name = display_name(entry.key.name);
  member.input = tensor.input;
  member.output = tensor.output;
  member.count = element_count(tensor.shape);
  member.ready_event = tensor.ready_event;
  member.padded = tensor.padded;
  member.locations = prepared.locations[index];
  const OpKind kind = entry.key.kind;
  if (kind != OpKind::Allgather && kind != OpKind::Alltoall && kind != OpKind::Reducescatter)
    return member;
  std::int64_t row = 1;
  for (std::size_t d = 1; d < tensor.shape.size(); ++d) row *= tensor.shape[d];
  std::int64_t own = 0;
  if (kind == OpKind::Reducescatter) {
    const auto& set = table_.sets().info(entry.key.process_set);
    member.counts = tensor.splits;
    for (std::size_t i = member.counts.size(); i < set.ranks.size(); ++i)
      member.counts.push_back(scattered_rows(tensor.shape.front(), set.ranks.size(), i) * row);
    const auto self = static_cast<std::size_t>(set.rank);
    own = tensor.splits.empty() ? scattered_rows(tensor.shape.front(), set.ranks.size(), self)
                                : tensor.splits[self];
  } else {
    for (const auto rows : entry.rows[place]) member.counts.push_back(rows * row);
    own = std::accumulate(entry.rows[place].begin(), entry.rows[place].end(), std::int64_t{0});
    if (kind == OpKind::Alltoall) {
      for (const auto rows : entry.before[place]) member.offsets.push_back(rows * row);
      for (const auto rows : tensor.splits) member.sends.push_back(rows * row);
    }
  }
  if (member.output == nullptr) member.output = entry.submission.allocate(place, own);
  return member;
}

Batch BatchRunner::make_batch(const Prepared& prepared) const {
  const PlannedBatch& plan = prepared.cut.plan;
  const Entry& first = *prepared.entries.front();
  Batch batch;
  batch.sequence = prepared.cut.sequence;
  batch.order = prepared.cut.order;
  batch.traits = traits_of(first.signature, plan.dtype, first.submission.device,
                           table_.sets().info(plan.process_set));
  std::set_difference(batch.traits.set->ranks.begin(), batch.traits.set->ranks.end(),
                      plan.absent.begin(), plan.absent.end(), std::back_inserter(batch.ranks));
  for (std::size_t i = 0; i < prepared.entries.size(); ++i)
    batch.members.push_back(make_member(prepared, i));
  batch.timed = parts_.timeline->on();
  return batch;
}

/// Counts the batch. What the library does for itself does not count.
void BatchRunner::count(const Prepared& prepared, const Batch& batch) const {
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < batch.members.size(); ++i) {
    if (prepared.entries[i]->submission.internal) continue;
    ++tensors;
    bytes +=
        static_cast<std::uint64_t>(batch.members[i].count) * element_bytes(prepared.cut.plan.dtype);
  }
  if (tensors == 0) return;
  StatsCounters& stats = *parts_.stats;
  if (reduces(batch.traits.kind)) stats.add(stats.bytes_reduced, bytes);
  stats.add(stats.batches_run, 1);
  if (tensors > 1) stats.add(stats.tensors_fused, tensors);
}

/// Counts the batch, and says which way it takes: once of each name and way.
void BatchRunner::note_way(const Prepared& prepared, const Execution& execution) {
  const auto route = execution.route();
  if (!route) return;
  const RouteChoice way{*route, execution.access()};
  StatsCounters& stats = *parts_.stats;
  stats.add(stats.routes[static_cast<std::size_t>(way.route)], 1);
  stats.add(stats.accesses[static_cast<std::size_t>(way.access)], 1);
  if (!log_enabled(LogLevel::Debug)) return;
  for (const Entry* entry : prepared.entries) {
    const std::string name(display_name(entry->key.name));
    if (told_ways_.size() >= kMostTold || !told_ways_.emplace(name, way).second) continue;
    const RouteRow& row = all_routes()[static_cast<std::size_t>(way.route)];
    log(LogLevel::Debug, "{} '{}', in a batch of {} bytes: {}, by {}: {}", name_of(entry->key.kind),
        name, prepared.cut.plan.bytes, name_of(way), row.who, row.why);
  }
}

void BatchRunner::launch(Prepared prepared) {
  const PlannedBatch& plan = prepared.cut.plan;
  {
    const EngineLock lock(mutex_);
    for (std::size_t i = 0; i < prepared.entries.size(); ++i) {
      Entry& entry = *prepared.entries[i];
      if (entry.state == EntryState::Agreed) entry.state = advance(entry.state, EntryEvent::Launch);
      entry.prepared[plan.tensors[i].index] = false;  // the backend takes back what `prepare` gave
    }
  }
  Backend* backend = prepared.entries.front()->backends[plan.tensors.front().index];
  Batch batch = make_batch(prepared);
  count(prepared, batch);
  for (const Entry* entry : prepared.entries)
    if (entry->trace != 0) parts_.timeline->launched(entry->trace, backend->name());
  std::shared_ptr<Execution> execution = backend->launch(std::move(batch));
  note_way(prepared, *execution);
  running_.push_back({std::move(prepared), backend, std::move(execution), false});
}

/// Says where the outputs will be to follow, once all of the batch is enqueued.
void BatchRunner::hand_over(Running& running) {
  running.handed_over = true;
  const EngineLock lock(mutex_);
  for (Entry* entry : running.batch.entries) {
    auto& completions = entry->pending->completions;
    // Tensors of one submission are often members of one batch.
    if (completions.empty() || completions.back().owner != running.execution)
      completions.push_back({running.execution->completion_event(), running.execution});
    if (--entry->unqueued > 0 || !entry->submission.on_stream) continue;
    entry->pending->enqueued.store(true, std::memory_order_release);
    mutex_.continuations().post(*entry->pending);
    mutex_.wake_own_threads();
  }
}

/// Lets the next batch of a set be cut while a device works on this one. Returns whether it has.
bool BatchRunner::retire_enqueued() {
  bool retired = false;
  for (auto& running : running_) {
    if (running.retired || !running.handed_over || !running.backend->keeps_order()) continue;
    const int set = running.batch.cut.plan.process_set;
    const auto waits_there = [set](const Running& other) {
      return other.handed_over && other.batch.cut.plan.process_set == set;
    };
    if (std::count_if(running_.begin(), running_.end(), waits_there) >= kEnqueuedOfASet) continue;
    retired = running.retired = true;
    const EngineLock lock(mutex_);
    cutter_.retire(running.batch.cut);
  }
  return retired;
}

void BatchRunner::finish(Running& running) {
  running.over = true;
  const EngineLock lock(mutex_);
  cutter_.retire(running.batch.cut);
  cutter_.depart(running.batch.cut);
  for (Entry* entry : running.batch.entries) {
    if (const auto since = running.execution->copying_out_since();
        since && entry->trace != 0 && entry->unfinished == 1)
      parts_.timeline->copying_out(entry->trace, since->time_since_epoch().count());
    if (--entry->unfinished == 0) engine_.finish(*entry, {});
  }
}

}  // namespace hvd
