// From a submission to an entry of the ledger.
#include <algorithm>
#include <array>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

void check_splits(const TensorArgument& tensor, std::size_t ranks, const std::string& what) {
  const auto& splits = tensor.splits;
  if (splits.size() != ranks)
    throw InvalidArgument(formatted("{}: {} splits for {} ranks; one number of rows for each rank is needed", what, splits.size(), ranks));
  std::int64_t sum = 0;
  for (const auto rows : splits) {
    if (rows < 0 || rows > tensor.shape.front() - sum)
      throw InvalidArgument(
          formatted("{}: the splits {} do not fit into the {} rows of the tensor", what, to_string(splits), tensor.shape.front()));
    sum += rows;
  }
}

void check_memory(const Submission& submission) {
  if (submission.kind == OpKind::Control) return;  // its shape is a list of ranks
  const bool needs_output = submission.kind == OpKind::Allreduce || submission.kind == OpKind::Broadcast;
  for (std::size_t i = 0; i < submission.tensors.size(); ++i) {
    const auto& tensor = submission.tensors[i];
    if (tensor.input != nullptr && (tensor.output != nullptr || !needs_output)) continue;
    if (element_count(tensor.shape) > 0)
      throw InvalidArgument(formatted("{} '{}': tensor {} of shape {} has no memory: its {} is a null pointer", name_of(submission.kind),
                                      submission.name, i, to_string(tensor.shape), tensor.input == nullptr ? "input" : "output"));
  }
}

}  // namespace

void Engine::raise_if_over() const {
  if (over_.ok() && board_.failed()) board_.failure().raise();
  over_.raise();
}

void Engine::check(const Submission& submission) const {
  const auto what = [&] { return formatted("{} '{}'", name_of(submission.kind), submission.name); };
  const auto shared_set = negotiator_.share_process_set(submission.process_set);
  if (!shared_set) throw InvalidArgument(formatted("{}: there is no process set {}", what(), submission.process_set));
  const auto& set = *shared_set;
  if (set.rank < 0)
    throw InvalidArgument(formatted("{}: rank {} is not in process set {} (ranks {})", what(), parts_.topology.rank, submission.process_set,
                                    rank_list(set.ranks)));
  if (submission.kind == OpKind::Broadcast && std::find(set.ranks.begin(), set.ranks.end(), submission.root) == set.ranks.end())
    throw InvalidArgument(formatted("{}: root rank {} is not in process set {} (ranks {})", what(), submission.root, submission.process_set,
                                    rank_list(set.ranks)));
  if (submission.tensors.size() > board_.slots())
    throw InvalidArgument(
        formatted("{}: a group of {} tensors is larger than HVD_CACHE_CAPACITY ({})", what(), submission.tensors.size(), board_.slots()));
  const bool by_rows =
      submission.kind == OpKind::Allgather || submission.kind == OpKind::Alltoall || submission.kind == OpKind::Reducescatter;
  if (!by_rows) return;
  for (const auto& tensor : submission.tensors) {
    if (tensor.shape.empty())
      throw InvalidArgument(formatted("{}: a scalar has no first dimension to {} along", what(),
                                      submission.kind == OpKind::Allgather ? "gather" : "scatter"));
    if (submission.kind == OpKind::Alltoall) check_splits(tensor, set.ranks.size(), what());
  }
}

Backend* Engine::backend_for(const BatchTraits& traits) const {
  const auto found = std::find_if(parts_.backends.begin(), parts_.backends.end(), [&](const auto& b) { return b->supports(traits); });
  return found == parts_.backends.end() ? nullptr : found->get();
}

std::shared_ptr<void> Engine::allocate(const Submission& like, DataType dtype, std::size_t bytes) {
  const auto shared_set = negotiator_.share_process_set(like.process_set);
  if (!shared_set || shared_set->rank < 0) return nullptr;
  const auto& set = *shared_set;
  const BatchTraits traits{.kind = like.kind, .dtype = dtype, .op = like.op, .device = like.device, .set = &set};
  Backend* const backend = backend_for(traits);
  return backend != nullptr ? backend->allocate(traits, bytes) : nullptr;
}

std::unique_ptr<Entry> Engine::make_entry(Submission submission) {
  check(submission);
  const auto set = negotiator_.share_process_set(submission.process_set);
  auto entry = std::make_unique<Entry>();
  entry->key = {submission.process_set, submission.kind, submission.name};
  if (!set) throw InvalidArgument(removed_text(entry->key));
  Signature& signature = entry->signature;
  signature.kind = submission.kind;
  signature.op = reduces(submission.kind) ? submission.op : ReduceOp::Sum;
  signature.device = submission.device.kind;
  signature.prescale_factor = submission.prescale_factor;
  signature.postscale_factor = submission.postscale_factor;
  const bool has_root = submission.kind == OpKind::Broadcast || submission.kind == OpKind::Control;
  signature.root = has_root ? submission.root : 0;
  for (const auto& tensor : submission.tensors) {
    signature.tensors.push_back({tensor.dtype, tensor.shape, tensor.splits});
    if (submission.kind == OpKind::Control) continue;
    const auto traits = traits_of(signature, tensor.dtype, submission.device, *set);
    Backend* const backend = backend_for(traits);
    if (backend == nullptr)
      throw InvalidArgument(formatted("{} '{}': {} of {} on {} is not supported", name_of(submission.kind), submission.name,
                                      reduces(submission.kind) ? name_of(submission.op) : name_of(submission.kind), name_of(tensor.dtype),
                                      name_of(submission.device.kind)));
    entry->backends.push_back(backend);
  }
  if (!is_plausible(signature, set->ranks.size()))
    throw InvalidArgument(formatted("{} '{}': a shape with negative or impossible sizes", name_of(entry->key.kind), entry->key.name));
  check_memory(submission);
  if (introduction_bytes(entry->key, signature) > Board::kLogBytes / 4)
    throw InvalidArgument(formatted("{} '{}...': {} tensors with a name of {} characters are more than the ranks can tell each other of",
                                    name_of(submission.kind), submission.name.substr(0, 40), submission.tensors.size(),
                                    submission.name.size()));
  entry->submission = std::move(submission);
  return entry;
}

void Engine::prepare(Entry& entry) {
  const auto& set = negotiator_.process_set(entry.key.process_set);
  const bool timed = timeline().on();
  const TraceTime from = timed ? Timeline::now() : 0;
  for (std::size_t i = 0; i < entry.backends.size(); ++i) {
    const auto& tensor = entry.submission.tensors[i];
    BatchMember member;
    member.name = entry.key.name;
    member.input = tensor.input;
    member.output = tensor.output;
    member.count = element_count(tensor.shape);
    member.ready_event = tensor.ready_event;
    const auto location = entry.backends[i]->prepare(traits_of(entry.signature, tensor.dtype, entry.submission.device, set), member);
    entry.locations.push_back(tensor.present ? location : location | kAbsent);
    entry.prepared.push_back(true);
    if (timed && member.copied) entry.copied = {from, Timeline::now()};
  }
}

void Engine::release(Entry& entry) noexcept {
  const auto& set = negotiator_.process_set(entry.key.process_set);
  for (std::size_t i = 0; i < entry.prepared.size(); ++i) {
    if (!entry.prepared[i]) continue;
    entry.prepared[i] = false;
    entry.backends[i]->release(traits_of(entry.signature, entry.submission.tensors[i].dtype, entry.submission.device, set),
                               entry.locations[i] & ~kAbsent);
  }
}

std::shared_ptr<HandleState> Engine::submit(Submission submission, After after) {
  auto fresh = make_entry(std::move(submission));
  Entry* entry = nullptr;
  bool numbered = false;
  std::array<char, kUnnamedText> text{};
  std::shared_ptr<HandleState> pending = fresh->pending;
  {
    std::unique_lock lock(mutex_);
    // What was submitted before a join takes part.
    while (fresh->key.kind == OpKind::Join && has_later(fresh->key.process_set) && over_.ok() && !board_.failed()) {
      lock.unlock();
      if (try_take_turn()) {
        progress();
        leave_turn();
      }
      std::this_thread::sleep_for(50us);
      lock.lock();
    }
    raise_if_over();
    if (stopping_) throw Shutdown("hvd::shutdown() has been called");
    if (!negotiator_.has_process_set(fresh->key.process_set)) throw InvalidArgument(removed_text(fresh->key));
    const auto& joined = negotiator_.joined(fresh->key.process_set);
    const bool excluded = std::binary_search(joined.begin(), joined.end(), parts_.topology.rank) ||
                          ledger_.find({fresh->key.process_set, OpKind::Join, std::string(kJoin)}) != nullptr;
    if (excluded && fresh->key.kind != OpKind::Join) throw Joined(joined_text(fresh->key, parts_.topology.rank));
    if (fresh->key.name.empty()) {
      fresh->key.name = made_up_name(fresh->key.process_set, fresh->key.kind, unnamed_[{fresh->key.process_set, fresh->key.kind}]++, text);
      numbered = true;
    }
    fresh->repeats = after == After::Wait;
    const Entry* const before = ledger_.find(fresh->key);
    const bool others_wait = later_.contains(fresh->key);
    // Who waits for a stream only comes back before the device is done: no mistake of theirs.
    const bool comes_back = fresh->submission.on_stream && before != nullptr && before->pending->enqueued.load() && !others_wait;
    if (others_wait && !numbered) throw duplicate(fresh->key);
    if (comes_back || (numbered && (before != nullptr || others_wait))) {
      try {
        prepare(*fresh);  // under the mutex, which keeps the order of the submissions
      } catch (...) {
        release(*fresh);
        if (numbered) --unnamed_[{fresh->key.process_set, fresh->key.kind}];
        throw;
      }
      parts_.stats->add(parts_.stats->tensors_submitted, fresh->backends.size());
      const UnitKey key = fresh->key;
      later_[key].push_back(std::move(fresh));
      return pending;
    }
    entry = &ledger_.admit(std::move(fresh));
  }
  const auto tensors = entry->backends.size();
  try {
    prepare(*entry);  // copies into shared memory: not under the mutex
  } catch (...) {
    const std::lock_guard lock(mutex_);
    release(*entry);
    const auto failed = ledger_.remove(*entry);
    // The number is free again, unless another thread has drawn the next one meanwhile.
    auto& next = unnamed_[{failed->key.process_set, failed->key.kind}];
    if (numbered && failed->key.name == made_up_name(failed->key.process_set, failed->key.kind, next - 1, text)) --next;
    throw;
  }
  bool work = false;
  bool small_work = false;
  {
    std::unique_lock lock(mutex_);
    note_submission(*entry);
    while (!announce(*entry)) {
      lock.unlock();
      nudge_readers();
      if (try_take_turn()) {
        progress();
        leave_turn();
      }
      lock.lock();
    }
    const auto is_small = [](const Prepared& batch) { return batch.cut.plan.bytes <= kSmallBatchBytes; };
    work = !to_launch_.empty();
    small_work = std::all_of(to_launch_.begin(), to_launch_.end(), is_small);
  }
  parts_.stats->add(parts_.stats->tensors_submitted, tensors);
  if (after == After::Wait && !turn_taken_.load()) return pending;  // wait() will drive
  if (work && small_work && try_take_turn()) {
    progress();
    leave_turn();
  } else if (work || parts_.transport) {
    board_.ring_waiters();  // among them a thread of this rank that has the turn and sleeps
    board_.ring_worker(board_.self());
  }
  return pending;
}

std::string_view Engine::made_up_name(int process_set, OpKind kind, std::uint64_t before, std::span<char> text) {
  const auto names = std::clamp<std::uint64_t>(board_.slots() / 4, 1, kUnnamedNames);
  return unnamed(kind, joins_[process_set], before % names, text);
}

bool Engine::has_later(int process_set) const {
  return std::any_of(later_.begin(), later_.end(), [&](const auto& waiting) { return waiting.first.process_set == process_set; });
}

bool Engine::can_announce_later() {
  return std::any_of(later_.begin(), later_.end(), [&](const auto& waiting) { return ledger_.find(waiting.first) == nullptr; });
}

bool Engine::announce_later() {
  bool announced = false;
  for (auto place = later_.begin(); place != later_.end();) {
    if (ledger_.find(place->first) != nullptr) {
      ++place;
      continue;
    }
    auto& waiting = place->second;
    Entry& entry = ledger_.admit(std::move(waiting.front()));
    waiting.pop_front();
    if (entry.trace == 0) note_submission(entry);
    if (!announce(entry)) {  // no room just now
      waiting.push_front(ledger_.remove(entry));
      board_.ring_all_workers();
      return announced;
    }
    announced = true;
    place = waiting.empty() ? later_.erase(place) : std::next(place);
  }
  return announced;
}

}  // namespace hvd
