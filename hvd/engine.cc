#include "hvd/engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "hvd/affinity.h"
#include "hvd/text.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kAbsent = std::uint64_t{1} << 63;  // of a location: this rank has nothing to say
constexpr std::uint64_t kByLane = std::uint64_t{1} << 60;  // of a Barrier's, which has no block: the rank has a lane for it
constexpr std::uint32_t kMaxOpenBatches = 1;               // more would start batches that could have been fused
constexpr auto kLookInterval = 100ms;                      // how often the living are counted
constexpr auto kSleep = 100ms;
constexpr auto kGraceForDecisions = 2s;
constexpr auto kConflictTime = 1s;
constexpr std::uint64_t kUnnamedNames = 256;  // per operation and process set; beyond as many in flight, submissions wait their turn
constexpr unsigned kYields = 400;             // the same for what must be polled: 4 B over MPI, 2 ranks, 35 us instead of 296
constexpr int kLaneYields = 20;               // 4 ranks on 2 cores, 4 B: 8 us instead of 22 with sleeping at once
constexpr auto kLaneYieldTime = 50us;         // a yield that takes longer gave the core to somebody else's work
constexpr int kSpins = 300;  // before sleeping, where every rank has a core: about 10 us. 2000 cost 17 to 67 us at the median where the
                             // partner had lost its core

constexpr OpKind kReducing[] = {OpKind::Allreduce, OpKind::Reducescatter};
bool reduces(OpKind kind) { return std::find(std::begin(kReducing), std::end(kReducing), kind) != std::end(kReducing); }

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

/// Of the log, for the record and for evictions that make room for it; never too few.
std::size_t introduction_bytes(const UnitKey& key, const Signature& signature) {
  std::size_t bytes = 128 + key.name.size();
  for (const auto& tensor : signature.tensors) bytes += 32 + (tensor.shape.size() + tensor.splits.size()) * sizeof(std::int64_t);
  return bytes;
}

std::uint32_t slots_for(const Signature& signature) { return std::max(1U, static_cast<std::uint32_t>(signature.tensors.size())); }

std::string joined_text(const UnitKey& key, int rank) {
  return formatted("{} '{}': rank {} has joined process set {}: it can submit again when all its ranks have", name_of(key.kind),
                   display_name(key.name), rank, key.process_set);
}

std::string removed_text(const UnitKey& key) {
  return formatted("{} '{}': process set {} was removed", name_of(key.kind), display_name(key.name), key.process_set);
}

BatchTraits traits_of(const Signature& signature, DataType dtype, Device device, const ProcessSetInfo& set) {
  return {signature.kind, dtype, signature.op, device, signature.prescale_factor, signature.postscale_factor, signature.root, &set};
}

}  // namespace

Engine::Engine(EngineParts parts)
    : parts_(std::move(parts)),
      board_(*parts_.board),
      spare_cores_(parts_.cores > static_cast<unsigned>(board_.ranks())),
      negotiator_(parts_.topology, parts_.process_sets, parts_.config.fusion_threshold_bytes, board_.slots(),
                  parts_.config.disable_group_fusion),
      last_look_(Clock::now()) {
  if (parts_.transport) {
    RelayActions actions;
    actions.introduce = [this](const UnitKey& key, int rank, const Signature& signature) { introduce_remote(key, rank, signature); };
    actions.agree = [this](const UnitKey& key, const Agreement& what) { agree_by_root(key, what); };
    actions.cut = [this] { with_log(0, [&] { commit(Negotiator::cut_record(Scope::World)); }); };
    actions.leave = [this](int rank) { with_log(0, [&] { commit(Negotiator::leaving(rank)); }); };
    actions.fail = [this](const Status& status) { board_.set_failure(status); };
    actions.end = [this] { with_log(0, [&] { commit(Negotiator::end()); }); };
    actions.conflict = [this](int set, const std::string& name, const std::vector<Claim>& claims) {
      with_log(0, [&] { commit_conflict(set, name, claims); });
    };
    actions.ranks_of = [this](int set) -> const std::vector<int>& { return negotiator_.process_set(set).ranks; };
    actions.domain_of = [this](int rank) { return parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)]; };
    relay_ = std::make_unique<Relay>(*parts_.transport, std::move(actions));
  }
  const auto ranks = static_cast<std::size_t>(board_.ranks());
  in_lanes_.reserve(kUnnamedNames);
  lane_ranks_.reserve(ranks);
  lane_locations_.reserve(ranks);
  coordination_ = std::thread([this] { coordinate(); });
}

Engine::~Engine() {
  stop_thread_.store(true);
  board_.ring_worker(board_.self());
  coordination_.join();
}

void Engine::die_for_test() {
  die_.store(true);
  board_.ring_worker(board_.self());
}

// ---------------------------------------------------------------------------------------------------------------- submitting

void Engine::raise_if_over() const {
  if (over_.ok() && board_.failed()) board_.failure().raise();
  over_.raise();
}

void Engine::check(const Submission& submission) const {
  const auto what = [&] { return formatted("{} '{}'", name_of(submission.kind), submission.name); };
  if (!negotiator_.has_process_set(submission.process_set))
    throw InvalidArgument(formatted("{}: there is no process set {}", what(), submission.process_set));
  const auto& set = negotiator_.process_set(submission.process_set);
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

std::unique_ptr<Entry> Engine::make_entry(Submission submission) {
  check(submission);
  auto entry = std::make_unique<Entry>();
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
    const auto traits = traits_of(signature, tensor.dtype, submission.device, negotiator_.process_set(submission.process_set));
    const auto backend = std::find_if(parts_.backends.begin(), parts_.backends.end(), [&](const auto& b) { return b->supports(traits); });
    if (backend == parts_.backends.end())
      throw InvalidArgument(formatted("{} '{}': {} of {} on {} is not supported", name_of(submission.kind), submission.name,
                                      reduces(submission.kind) ? name_of(submission.op) : name_of(submission.kind), name_of(tensor.dtype),
                                      name_of(submission.device.kind)));
    entry->backends.push_back(backend->get());
  }
  entry->key = {submission.process_set, submission.kind, submission.name};
  if (!is_plausible(signature, negotiator_.process_set(entry->key.process_set).ranks.size()))
    throw InvalidArgument(formatted("{} '{}': a shape with negative or impossible sizes", name_of(entry->key.kind), entry->key.name));
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

std::shared_ptr<Pending> Engine::submit(Submission submission, After after) {
  auto fresh = make_entry(std::move(submission));
  Entry* entry = nullptr;
  bool numbered = false;
  std::array<char, kUnnamedText> text{};
  std::shared_ptr<Pending> pending = fresh->pending;
  {
    std::unique_lock lock(mutex_);
    // What was submitted before a join takes part.
    while (fresh->key.kind == OpKind::Join && has_later(fresh->key.process_set) && over_.ok() && !board_.failed()) {
      lock.unlock();
      if (try_take_wheel()) {
        drive_once();
        leave_wheel();
      }
      std::this_thread::sleep_for(50us);
      lock.lock();
    }
    raise_if_over();
    if (stopping_) throw Shutdown("hvd::shutdown() has been called");
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
      if (try_take_wheel()) {
        drive_once();
        leave_wheel();
      }
      lock.lock();
    }
    const auto is_small = [](const Prepared& batch) { return batch.cut.plan.bytes <= kSmallBatchBytes; };
    work = !to_launch_.empty();
    small_work = std::all_of(to_launch_.begin(), to_launch_.end(), is_small);
  }
  parts_.stats->add(parts_.stats->tensors_submitted, tensors);
  if (after == After::Wait && !wheel_taken_.load()) return pending;  // wait() will drive
  if (work && small_work && try_take_wheel()) {
    drive_once();
    leave_wheel();
  } else if (work || parts_.transport) {
    board_.ring_waiters();  // among them a thread of this rank that has the wheel and sleeps
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

void Engine::note_submission(Entry& entry) {
  if (!timeline().on()) return;
  entry.trace = timeline().submitted(entry.submission, display_name(entry.key.name), is_unnamed(entry.key.name),
                                     entry.since.time_since_epoch().count(), entry.copied);
}

bool Engine::announce(Entry& entry) {
  const auto refuse = [&](Status::Code code, std::string text) {
    finish_entry(entry, {code, std::move(text)});
    return true;
  };
  if (!over_.ok()) return refuse(over_.code(), over_.text());
  // From its announcement on the entry is everybody's: reading the log may finish it.
  bool finished = false;
  const int set = entry.key.process_set;
  const int rank = parts_.topology.rank;
  try {
    read_log();
    const auto& joined = negotiator_.joined(set);
    const bool has_joined = std::binary_search(joined.begin(), joined.end(), rank);
    if (has_joined && entry.key.kind != OpKind::Join) return refuse(Status::Code::Joined, joined_text(entry.key, rank));
    if (!has_joined && entry.key.kind == OpKind::Join && negotiator_.has_process_set(set)) join(set);
    while (true) {
      if (!introduce(entry)) return false;
      if (!negotiator_.has_process_set(set)) return refuse(Status::Code::InvalidArgument, removed_text(entry.key));
      const Unit& unit = negotiator_.unit(entry.unit);
      for (std::uint32_t i = 0; i < unit.slots; ++i) board_.set_location(unit.id + i, i < entry.locations.size() ? entry.locations[i] : 0);
      const auto id = unit.id;
      const std::uint32_t arrived = board_.arrive(id, unit.generation);
      if (arrived == 0) continue;  // evicted between the two: introduce it again
      entry.announced = finished = true;
      after_arriving(entry, arrived);
      return true;
    }
  } catch (...) {
    // Records that cannot be read, or a bug: the ranks' tables may differ from here on, so the world ends for all.
    const Status status = status_of_current_exception();
    board_.set_failure(status);
    if (!finished) finish_entry(entry, board_.failure());
    return true;
  }
}

void Engine::after_arriving(Entry& entry, std::uint32_t arrived) {
  const int set = entry.key.process_set;
  const auto id = entry.unit;
  if (arrived == negotiator_.local_members(set)) return agree(id);
  // A rank that has joined meanwhile may have looked here before this one arrived: either it has seen the arrival, or this rank
  // sees its record: arrivals and the log's tail are sequentially consistent.
  read_log();
  if (!negotiator_.joined(set).empty() && is_complete(id)) return agree(id);
  if (!negotiator_.any_left()) return;
  for (int other = 0; other < parts_.topology.size; ++other)
    if (negotiator_.left()[static_cast<std::size_t>(other)] && fail_if_left(id, other)) return;
}

bool Engine::introduce(Entry& entry) {
  const int rank = parts_.topology.rank;
  const auto slots = slots_for(entry.signature);
  read_log();
  if (!negotiator_.has_process_set(entry.key.process_set)) return true;
  const Unit* unit = negotiator_.find(entry.key);
  if (unit == nullptr || unit->slots < slots || !negotiator_.introduced(*unit, rank, entry.signature)) {
    Room room = Room::Now;
    with_log(introduction_bytes(entry.key, entry.signature), [&] {
      if (!negotiator_.has_process_set(entry.key.process_set)) return;
      room = make_room_for(entry.key, slots);
      if (room != Room::Now) return;
      commit(*negotiator_.introduction(entry.key, rank, entry.signature, [this](std::uint32_t slot) { return board_.generation(slot); }));
    });
    if (room == Room::None)
      throw BackendError(formatted("more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
    if (room != Room::Now) return false;
    unit = negotiator_.find(entry.key);
    entry.repeats = false;
  }
  if (unit != nullptr) ledger_.bind(entry, unit->id);
  return true;
}

void Engine::introduce_remote(const UnitKey& key, int rank, const Signature& signature) {
  if (is_here(rank)) return;
  for (Room room = Room::AfterReading; room == Room::AfterReading;) {
    with_log(introduction_bytes(key, signature), [&] {
      room = Room::Now;
      if (!negotiator_.has_process_set(key.process_set)) return;
      const Unit* unit = negotiator_.find(key);
      if (unit != nullptr && negotiator_.introduced(*unit, rank, signature)) return;
      // Without room it is told again when this domain needs it: when a rank here introduces it, or when it is agreed.
      if (unit == nullptr) room = make_room(slots_for(signature));
      if (room == Room::Now)
        commit(*negotiator_.introduction(key, rank, signature, [this](std::uint32_t slot) { return board_.generation(slot); }));
    });
    if (room == Room::AfterReading) nudge_readers();
  }
}

void Engine::agree_by_root(const UnitKey& key, const Agreement& what) {
  // All domains keep the same queue, also of what none of their ranks takes part in, and which they may have forgotten.
  // Or have forgotten in the middle of the ranks' introductions, and learnt anew from the rest of them.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    bool done = false;
    with_log(64 + what.present.size() / 8 + what.absent.size() * sizeof(int), [&] {
      const Unit* unit = negotiator_.find(key);
      done = !negotiator_.has_process_set(key.process_set);
      if (done || unit == nullptr) return;
      done = negotiator_.has_introduced_all(*unit, what.absent) || i + 1 == kTries;
      if (done) commit(Negotiator::agreement(unit->id, what));
    });
    if (done) return;
    relay_->retell(key);
  }
  throw BackendError(formatted("more than HVD_CACHE_CAPACITY ({}) tensors are in flight at once", board_.slots()));
}

bool Engine::evictable(std::uint32_t id) const {
  // Its slots may be given to another tensor once nobody has arrived, its last batch is cut, and every rank has read that record and
  // with it the locations. What other domains have said of it the relay remembers.
  const Unit& unit = negotiator_.unit(id);
  return !unit.undecided && board_.arrivals(id) == 0 && unit.cut_at <= board_.slowest_reader() && board_.are_results_taken(id);
}

Engine::Room Engine::make_room_for(const UnitKey& key, std::uint32_t slots) {
  const Unit* unit = negotiator_.find(key);
  if (unit == nullptr) return make_room(slots);
  // A name that comes back with more tensors moves. Where a rank has arrived with fewer, or its domain is ready, the ranks disagree, and
  // that can be said without slots.
  const bool settled = board_.arrivals(unit->id) == 0 && (!unit->undecided || unit->queued);
  if (unit->slots >= slots || !settled) return Room::Now;
  if (unit->queued) return Room::AfterCutting;
  if (!evictable(unit->id)) return board_.arrivals(unit->id) > 0 ? Room::Now : Room::AfterReading;
  if (!board_.evict(unit->id)) return Room::Now;
  commit(Negotiator::eviction(unit->id));
  return make_room(slots);
}

Engine::Room Engine::make_room(std::uint32_t slots) {
  while (!negotiator_.has_free_slots(slots)) {
    if (const auto id = negotiator_.oldest([this](std::uint32_t candidate) { return evictable(candidate); })) {
      if (board_.evict(*id)) commit(Negotiator::eviction(*id));
      continue;
    }
    const auto unread = [this](std::uint32_t id) { return !negotiator_.unit(id).undecided && board_.arrivals(id) == 0; };
    const auto uncut = [this](std::uint32_t id) { return negotiator_.unit(id).queued && board_.arrivals(id) == 0; };
    return negotiator_.oldest(unread) ? Room::AfterReading : negotiator_.oldest(uncut) ? Room::AfterCutting : Room::None;
  }
  return Room::Now;
}

void Engine::nudge_readers() {
  board_.ring_all_workers();
  board_.ring_waiters();
  if (const auto dead = board_.find_dead())
    board_.set_failure({Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()",
                                                            parts_.topology.domain_ranks[static_cast<std::size_t>(*dead)])});
  std::this_thread::sleep_for(50us);
}

std::vector<int> Engine::absent_from(const Unit& unit) const {
  std::vector<int> absent;
  if (unit.key.kind == OpKind::Join) return absent;
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : negotiator_.joined(unit.key.process_set)) {
    const auto place = std::lower_bound(domain.begin(), domain.end(), rank);
    if (place == domain.end() || *place != rank) continue;
    if (!board_.has_arrived(unit.id, static_cast<int>(place - domain.begin()))) absent.push_back(rank);
  }
  return absent;
}

bool Engine::is_complete(std::uint32_t id) const {
  if (!negotiator_.knows(id)) return false;
  const Unit& unit = negotiator_.unit(id);
  const std::uint32_t arrived = board_.arrivals(id);
  return arrived > 0 && arrived + absent_from(unit).size() == negotiator_.local_members(unit.key.process_set);
}

bool Engine::have_read(const std::vector<int>& ranks, std::uint64_t position) const {
  const auto& domain = parts_.topology.domain_ranks;
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto place = std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin();
    return board_.read_position(static_cast<int>(place)) >= position;
  });
}

void Engine::agree(std::uint32_t id) {
  bool said = false;
  bool world = false;
  bool unread = true;
  const auto& all = negotiator_.process_set(negotiator_.unit(id).key.process_set).ranks;
  const std::size_t bytes = negotiator_.unit(id).slots / 8 + 4 * all.size() + 128;
  const auto say = [&] {
    unread = false;
    // Two may find a unit complete, where ranks have joined; the first to come says so.
    if (!is_complete(id)) return;
    const Unit& unit = negotiator_.unit(id);
    const auto& set = negotiator_.process_set(unit.key.process_set);
    Agreement what;
    what.present.assign(unit.slots, false);
    what.absent = absent_from(unit);
    // One that has joined does not hold up a new round by arriving late. Before the slot's words are written anew it must have read the
    // cut of the last round, in which it may have taken part.
    unread = !have_read(what.absent, unit.cut_at);
    if (unread) return;
    // Not the rank that says so: it may have been overtaken between its joining and its arriving here.
    what.last = unit.key.kind == OpKind::Join ? negotiator_.last_joined(unit.key.process_set) : parts_.topology.rank;
    const auto& domain = parts_.topology.domain_ranks;
    for (std::size_t index = 0; index < domain.size(); ++index) {
      if (!std::binary_search(set.ranks.begin(), set.ranks.end(), domain[index])) continue;
      if (std::binary_search(what.absent.begin(), what.absent.end(), domain[index])) continue;
      for (std::uint32_t i = 0; i < unit.slots; ++i)
        if ((board_.coming_location(id + i, static_cast<int>(index)) & kAbsent) == 0) what.present[i] = true;
    }
    world = unit.scope == Scope::World;
    said = true;
    // Before the record: whoever reads it may arrive at the slot again at once.
    board_.reset_arrivals(id, unit.slots);
    commit(world ? Negotiator::host_readiness(id, what) : Negotiator::agreement(id, what));
    if (!world) cut_if_idle();
  };
  while (unread) {
    with_log(bytes, say);
    if (unread) nudge_readers();
    if (unread && board_.failed()) return;
  }
  if (said && world) board_.ring_worker(0);  // the leader has something to pass on
}

void Engine::join(int process_set) {
  const int rank = parts_.topology.rank;
  with_log(64, [&] { commit(Negotiator::joining(process_set, rank)); });
  std::vector<std::uint32_t> complete;
  for (const Unit* unit : negotiator_.units_of(process_set))
    if (is_complete(unit->id)) complete.push_back(unit->id);
  for (const auto id : complete)
    if (negotiator_.knows(id)) agree(id);
  with_log(64, [&] { commit(Negotiator::joined_up(process_set, rank)); });
}

// --------------------------------------------------------------------------------------------------------------------- lanes

void Engine::make_lane(const Entry& entry) noexcept {
  try {
    const auto kind = entry.key.kind;
    const bool has_block = entry.backends.size() == 1 && entry.signature.tensors.size() == 1;
    if (!(has_block || kind == OpKind::Barrier) || kind == OpKind::Alltoall || kind == OpKind::Control) return;
    if (negotiator_.scope_of(entry.key.process_set) != Scope::Domain || !negotiator_.knows(entry.unit)) return;
    const Unit& unit = negotiator_.unit(entry.unit);
    const auto& set = negotiator_.process_set(entry.key.process_set);
    auto lane = std::make_shared<Lane>();
    lane->unit = unit.id;
    lane->generation = unit.generation;
    lane->signature = unit.signatures[static_cast<std::size_t>(set.rank)];
    if (!(unit.key == entry.key) || !lane->signature || !(*lane->signature == entry.signature)) return;
    const auto known = lanes_.find(entry.key.process_set, kind, entry.key.name);
    if (known && known->unit == lane->unit && known->generation == lane->generation && known->signature == lane->signature) return;
    const std::size_t ranks = set.ranks.size();
    if (has_block) {
      const TensorSignature& tensor = entry.signature.tensors.front();
      lane->backend = entry.backends.front();
      lane->traits = traits_of(entry.signature, tensor.dtype, entry.submission.device, set);
      lane->count = element_count(tensor.shape);
      lane->input_bytes = lane->result_bytes = static_cast<std::size_t>(lane->count) * element_bytes(tensor.dtype);
      if (kind == OpKind::Allgather) {
        lane->result_bytes *= ranks;
        lane->result_rows = tensor.shape.front() * static_cast<std::int64_t>(ranks);
      }
      if (static_cast<std::int64_t>(lane->result_bytes) > kLaneBytes) return;
      if (kind == OpKind::Reducescatter) {
        const std::int64_t rows = tensor.shape.front();
        const std::size_t row = rows == 0 ? 0 : lane->input_bytes / static_cast<std::size_t>(rows);
        const auto place = static_cast<std::size_t>(set.rank);
        for (std::size_t before = 0; before < place; ++before)
          lane->result_at += static_cast<std::size_t>(scattered_rows(rows, ranks, before)) * row;
        lane->result_rows = scattered_rows(rows, ranks, place);
        lane->result_bytes = static_cast<std::size_t>(lane->result_rows) * row;
      }
      // Lanes of names that did not come back make room for this one.
      while (lanes_.size() >= board_.slots()) {
        const auto* stale = lanes_.find_if([&](const Lane& other) {
          return !other.place.entry.empty() && !other.in_use.load() &&
                 (!negotiator_.knows(other.unit) || negotiator_.unit(other.unit).generation != other.generation);
        });
        if (stale == nullptr) return;
        drop_lane(UnitKey(*stale));
      }
      drop_lane(entry.key);
      const auto location = lane->backend->keep(lane->traits, std::max<std::size_t>({lane->input_bytes, lane->result_bytes, 1}));
      if (!location) return;
      lane->location = *location;
    }
    auto fresh = std::make_unique<Entry>();
    fresh->key = entry.key;
    fresh->signature = entry.signature;
    fresh->backends = entry.backends;
    fresh->lane = lane.get();
    fresh->submission.kind = kind;
    fresh->submission.name = entry.submission.name;
    fresh->submission.process_set = entry.key.process_set;
    fresh->submission.op = entry.submission.op;
    fresh->submission.prescale_factor = entry.submission.prescale_factor;
    fresh->submission.postscale_factor = entry.submission.postscale_factor;
    fresh->submission.root = entry.submission.root;
    fresh->submission.device = entry.submission.device;
    fresh->submission.tensors = entry.submission.tensors;
    fresh->submission.allocate = [raw = lane.get()](std::size_t /*index*/, std::int64_t rows) -> void* {
      return raw->allocate != nullptr ? raw->allocate(raw->context, rows) : nullptr;
    };
    if (!has_block) lane->location = kByLane;
    fresh->locations.assign(has_block ? 1 : 0, lane->location);
    fresh->prepared.assign(has_block ? 1 : 0, true);
    lane->pending = fresh->pending;
    // By way of the ledger, for its nodes. The entry that has just ended is out of it.
    Entry& placed = ledger_.admit(std::move(fresh));
    ledger_.bind(placed, unit.id);
    lane->place = ledger_.take_out(placed);
    lanes_.add(entry.key, std::move(lane));
  } catch (...) {
    log(LogLevel::Debug, "no lane for '{}': {}", display_name(entry.key.name), status_of_current_exception().text());
  }
}

void Engine::drop_lane(const UnitKey& key) noexcept {
  if (const auto lane = lanes_.remove(key); lane && lane->backend != nullptr) lane->backend->drop(lane->location);
}

std::size_t Engine::drop_lanes_for_test() {
  const std::lock_guard lock(mutex_);
  const std::size_t count = lanes_.size();
  while (const auto* key = lanes_.find_if([](const Lane&) { return true; })) drop_lane(UnitKey(*key));
  return count;
}

bool Engine::take_lane(Lane& lane, const Immediate& call, Entry*& taken) {
  const auto& set = negotiator_.process_set(call.process_set);
  if (!lane.fits(call) || !negotiator_.joined(call.process_set).empty() || !negotiator_.knows(lane.unit)) return false;
  const Unit& unit = negotiator_.unit(lane.unit);
  if (unit.generation != lane.generation || unit.signatures[static_cast<std::size_t>(set.rank)] != lane.signature) return false;
  if (lane.backend != nullptr && !lane.backend->is_free(lane.location)) return false;
  if (!ledger_.put_back(lane.place)) return false;
  Entry& entry = *ledger_.find(lane.unit);
  entry.state = EntryState::Waiting;
  entry.announced = false;
  entry.unfinished = 0;
  entry.prepared.assign(entry.prepared.size(), true);
  entry.rows.clear();
  entry.before.clear();
  entry.since = entry.reported = Clock::now();
  lane.allocate = call.allocate;
  lane.context = call.context;
  if (!entry.submission.tensors.empty()) {
    entry.submission.tensors.front().input = call.input;
    entry.submission.tensors.front().output = call.output;
  }
  Pending& pending = *lane.pending;
  pending.done.store(false, std::memory_order_relaxed);
  pending.waited_for.store(true, std::memory_order_relaxed);
  pending.status = {};
  if (lane.input_bytes > 0 && (call.kind != OpKind::Broadcast || call.root == parts_.topology.rank))
    std::memcpy(lane.backend->kept(lane.location), call.input, lane.input_bytes);
  taken = &entry;
  return true;
}

bool Engine::run_immediately(const Immediate& call) {
  std::shared_ptr<Lane> lane;
  bool for_all = false;
  {
    const std::lock_guard lock(mutex_);
    if (!over_.ok() || stopping_ || board_.failed() || timeline().on() || lanes_.size() == 0) return false;  // submit() knows what to say
    Entry* entry = nullptr;
    try {
      read_log();
      std::string_view name = call.name;
      std::array<char, kUnnamedText> text{};
      std::uint64_t* unnamed = nullptr;
      if (name.empty()) {
        if (!later_.empty()) return false;
        unnamed = &unnamed_[{call.process_set, call.kind}];
        name = made_up_name(call.process_set, call.kind, *unnamed, text);
      }
      lane = lanes_.find(call.process_set, call.kind, name);
      if (!lane || lane->in_use.exchange(true)) return false;
      if (!take_lane(*lane, call, entry)) {
        lane->in_use.store(false);
        return false;
      }
      board_.set_location(lane->unit, lane->location);
      const std::uint32_t arrived = board_.arrive(lane->unit, lane->generation);
      if (arrived == 0) {  // evicted meanwhile
        lane->place = ledger_.take_out(*entry);
        lane->in_use.store(false);
        return false;
      }
      if (unnamed != nullptr) ++*unnamed;
      entry->announced = true;
      in_lanes_.push_back(entry);
      for_all = arrived == negotiator_.local_members(call.process_set) && run_for_all(*lane);
      if (for_all) {
        take_result(*entry);
      } else {
        after_arriving(*entry, arrived);
      }
    } catch (...) {
      board_.set_failure(status_of_current_exception());
      if (entry == nullptr) return false;
      if (!entry->announced) finish_entry(*entry, board_.failure());
    }
  }
  if (for_all) board_.ring_waiters();
  parts_.stats->add(parts_.stats->tensors_submitted, call.kind == OpKind::Barrier ? 0 : 1);
  if (!for_all) {
    // Where ranks share cores, the one awaited may be the next to run here.
    const bool own_core = static_cast<unsigned>(board_.ranks()) <= parts_.cores;
    const auto is_done = [&] { return board_.has_result(lane->unit) || lane->pending->done.load(std::memory_order_relaxed); };
    if (own_core) {
      for (int i = 0; i < kSpins && !is_done(); ++i) cpu_relax();
    } else {
      const auto until = Clock::now() + kLaneYieldTime;
      for (int i = 0; i < kLaneYields && !is_done() && Clock::now() < until; ++i) std::this_thread::yield();
    }
    if (board_.has_result(lane->unit)) {
      const std::lock_guard lock(mutex_);
      take_results();
    }
  }
  struct Leaving {
    Lane& lane;
    ~Leaving() { lane.in_use.store(false); }
  } const leaving{*lane};
  wait(*lane->pending);
  return true;
}

bool Engine::run_for_all(const Lane& lane) {
  const BoardLock lock(board_);
  read_log();
  if (!negotiator_.knows(lane.unit) || negotiator_.unit(lane.unit).generation != lane.generation || !is_complete(lane.unit)) return false;
  const Unit& unit = negotiator_.unit(lane.unit);
  if (!negotiator_.joined(unit.key.process_set).empty()) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  for (const auto& signature : unit.signatures)
    if (signature != lane.signature) return false;
  lane_ranks_.clear();
  lane_locations_.clear();
  const auto& domain = parts_.topology.domain_ranks;
  for (const int rank : negotiator_.process_set(unit.key.process_set).ranks) {
    const auto index = static_cast<int>(std::lower_bound(domain.begin(), domain.end(), rank) - domain.begin());
    lane_ranks_.push_back(index);
    lane_locations_.push_back(board_.coming_location(lane.unit, index));
  }
  const bool done = lane.backend != nullptr
                        ? lane.backend->run_for_all(lane.traits, lane.count, lane_locations_)
                        : std::all_of(lane_locations_.begin(), lane_locations_.end(), [](auto location) { return location == kByLane; });
  if (!done) return false;
  board_.reset_arrivals(lane.unit, 1);
  board_.give_results(lane.unit, lane_ranks_);
  return true;
}

void Engine::take_results() {
  for (std::size_t i = 0; i < in_lanes_.size();) {
    Entry& entry = *in_lanes_[i];
    if (entry.state == EntryState::Waiting && board_.has_result(entry.unit)) {
      take_result(entry);  // takes it out of the list
    } else {
      ++i;
    }
  }
}

void Engine::take_result(Entry& entry) {
  const Lane& lane = *entry.lane;
  board_.take_result(entry.unit);
  const bool is_source = entry.key.kind == OpKind::Broadcast && entry.signature.root == parts_.topology.rank;
  if (lane.backend != nullptr && !(is_source && entry.submission.tensors.front().input == entry.submission.tensors.front().output)) {
    void* output = entry.submission.tensors.front().output;
    if (output == nullptr && lane.allocate != nullptr) output = lane.allocate(lane.context, lane.result_rows);
    if (lane.result_bytes > 0) std::memcpy(output, lane.backend->kept(lane.location) + lane.result_at, lane.result_bytes);
  }
  StatsCounters& stats = *parts_.stats;
  stats.add(stats.negotiation_rounds, 1);
  if (lane.backend != nullptr) stats.add(stats.batches_run, 1);
  if (reduces(entry.key.kind)) stats.add(stats.bytes_reduced, lane.input_bytes);
  entry.state = advance(entry.state, EntryEvent::Agree);
  finish_entry(entry, {});
}

// ------------------------------------------------------------------------------------------------------------------- the log

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
    const auto backend = std::find_if(parts_.backends.begin(), parts_.backends.end(), [&](const auto& b) { return b->supports(traits); });
    const bool alone = backend != parts_.backends.end() && (*backend)->any_rank_finishes(traits, cut.plan.bytes);
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
  for (const int rank : outcomes.left) fail_what_waits_for(rank);
  for (const auto& voided : outcomes.voided)
    for (const auto id : voided.ids)
      if (Entry* entry = ledger_.find(id); entry != nullptr && entry->announced && entry->state == EntryState::Waiting)
        finish_entry(*entry, voided.status);
  if (relay_) note_news(outcomes);
}

void Engine::note_news(const Outcomes& outcomes) {
  // Spelled out now: by the time the relay passes it on, the id may stand for another tensor.
  for (const auto& [id, rank] : outcomes.introduced) {
    const Unit& unit = negotiator_.unit(id);
    if (unit.scope != Scope::World || !is_here(rank)) continue;
    const auto& ranks = negotiator_.process_set(unit.key.process_set).ranks;
    const auto place = static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
    news_.push_back({News::Kind::Introduced, unit.key, rank, unit.signatures[place]});
  }
  for (const auto& [id, what] : outcomes.host_ready) news_.push_back({News::Kind::Ready, negotiator_.unit(id).key, -1, nullptr, what});
  for (const auto& [set, rank] : outcomes.joined)
    if (is_here(rank)) news_.push_back({News::Kind::Joined, {set, OpKind::Join, {}}, rank});
  for (const int rank : outcomes.left)
    if (is_here(rank)) news_.push_back({News::Kind::Left, {}, rank});
  for (const auto& agreed : outcomes.agreed)
    if (const auto& key = negotiator_.unit(agreed.id).key;
        key.kind == OpKind::Control && key.name == kRemoveProcessSet && agreed.verdict.ok())
      news_.push_back({News::Kind::Removed, {agreed.what.last, OpKind::Control, {}}});
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
    for (const auto& signature : unit.signatures) {
      const TensorSignature& tensor = signature->tensors[i];
      if (unit.key.kind == OpKind::Allgather) {
        rows.push_back(tensor.shape.front());
      } else {
        rows.push_back(tensor.splits.at(self));
        before.push_back(
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

bool Engine::fail_if_left(std::uint32_t id, int left_rank) {
  Entry* const found = ledger_.find(id);
  if (found == nullptr) return false;
  Entry& entry = *found;
  if (entry.state != EntryState::Waiting || !entry.announced || left_rank == parts_.topology.rank) return false;
  const auto& ranks = negotiator_.process_set(entry.key.process_set).ranks;
  if (!std::binary_search(ranks.begin(), ranks.end(), left_rank)) return false;
  const auto& domain = parts_.topology.domain_ranks;
  const auto here = std::lower_bound(domain.begin(), domain.end(), left_rank);
  const bool is_here = here != domain.end() && *here == left_rank;
  if (is_here && board_.has_arrived_too(entry.unit, static_cast<int>(here - domain.begin()))) return false;
  // One elsewhere may have been ready before it left, and the root's decision be on its way: `report_stalls` gives it time.
  if (!is_here && Clock::now() - entry.since < kGraceForDecisions) return false;
  finish_entry(entry, {Status::Code::Shutdown, formatted("{} '{}': rank {} has called hvd::shutdown() without submitting it",
                                                         name_of(entry.key.kind), display_name(entry.key.name), left_rank)});
  return true;
}

void Engine::fail_what_waits_for(int left_rank) {
  for (Entry* entry : ledger_.all())
    if (entry->announced) fail_if_left(entry->unit, left_rank);
}

// ------------------------------------------------------------------------------------------------------------------- driving

bool Engine::try_take_wheel() {
  bool expected = false;
  return !wheel_taken_.load(std::memory_order_relaxed) && wheel_taken_.compare_exchange_strong(expected, true, std::memory_order_acquire);
}

void Engine::leave_wheel() {
  const bool unfinished = !running_.empty();
  wheel_taken_.store(false, std::memory_order_release);
  bool others = false;
  bool more = unfinished;
  {
    const std::lock_guard lock(mutex_);
    others = waiters_ > 0;
    more = more || !to_launch_.empty() || can_announce_later() || (parts_.transport && !ledger_.empty());
  }
  if (others) changed_.notify_all();
  if (more) board_.ring_worker(board_.self());
}

bool Engine::drive_once() noexcept {
  bool progressed = false;
  try {
    if (board_.failed()) {
      fail_everything(board_.failure());
      return false;
    }
    std::vector<Prepared> batches;
    {
      const std::lock_guard lock(mutex_);
      read_log();
      take_results();
      if (!later_.empty()) progressed = announce_later();
      batches.swap(to_launch_);
      if (negotiator_.all_left()) fail_what_was_never_agreed();
    }
    for (auto& batch : batches) launch(std::move(batch));
    progressed = progressed || !batches.empty();
    for (auto& running : running_) {
      const Progress progress = running.execution->advance();
      progressed = progressed || progress != Progress::Idle;
      if (!running.handed_over && running.execution->is_enqueued()) hand_over(running);
      if (progress == Progress::Done) finish(running);
    }
    std::erase_if(running_, [](const Running& running) { return running.over; });
    if (relay_) drive_relay(progressed);
  } catch (...) {
    fail_world(status_of_current_exception());
    return false;
  }
  return progressed;
}

BatchMember Engine::make_member(const Prepared& batch, std::size_t index) {
  const Entry& entry = *batch.entries[index];
  const std::uint32_t place = batch.cut.plan.tensors[index].index;
  const TensorArgument& tensor = entry.submission.tensors[place];
  BatchMember member;
  member.name = display_name(entry.key.name);
  member.input = tensor.input;
  member.output = tensor.output;
  member.count = element_count(tensor.shape);
  member.ready_event = tensor.ready_event;
  member.locations = batch.locations[index];
  const OpKind kind = entry.key.kind;
  if (kind != OpKind::Allgather && kind != OpKind::Alltoall && kind != OpKind::Reducescatter) return member;
  std::int64_t row = 1;
  for (std::size_t d = 1; d < tensor.shape.size(); ++d) row *= tensor.shape[d];
  std::int64_t own = 0;
  if (kind == OpKind::Reducescatter) {
    const auto& set = negotiator_.process_set(entry.key.process_set);
    for (std::size_t i = 0; i < set.ranks.size(); ++i)
      member.counts.push_back(scattered_rows(tensor.shape.front(), set.ranks.size(), i) * row);
    own = scattered_rows(tensor.shape.front(), set.ranks.size(), static_cast<std::size_t>(set.rank));
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

void Engine::launch(Prepared prepared) {
  const PlannedBatch& plan = prepared.cut.plan;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < prepared.entries.size(); ++i) {
      Entry& entry = *prepared.entries[i];
      if (entry.state == EntryState::Agreed) entry.state = advance(entry.state, EntryEvent::Launch);
      entry.prepared[plan.tensors[i].index] = false;  // the backend takes back what `prepare` gave
    }
  }
  const Entry& first = *prepared.entries.front();
  Backend* backend = first.backends[plan.tensors.front().index];
  Batch batch;
  batch.sequence = prepared.cut.sequence;
  batch.order = prepared.cut.order;
  batch.traits = traits_of(first.signature, plan.dtype, first.submission.device, negotiator_.process_set(plan.process_set));
  std::set_difference(batch.traits.set->ranks.begin(), batch.traits.set->ranks.end(), plan.absent.begin(), plan.absent.end(),
                      std::back_inserter(batch.ranks));
  for (std::size_t i = 0; i < prepared.entries.size(); ++i) {
    batch.members.push_back(make_member(prepared, i));
    if (reduces(batch.traits.kind))
      parts_.stats->add(parts_.stats->bytes_reduced, static_cast<std::uint64_t>(batch.members.back().count) * element_bytes(plan.dtype));
  }
  parts_.stats->add(parts_.stats->batches_run, 1);
  if (batch.members.size() > 1) parts_.stats->add(parts_.stats->tensors_fused, batch.members.size());
  batch.timed = timeline().on();
  for (const Entry* entry : prepared.entries)
    if (entry->trace != 0) timeline().launched(entry->trace, backend->name());
  std::shared_ptr<Execution> execution = backend->launch(std::move(batch));
  running_.push_back({std::move(prepared), backend, std::move(execution), false});
}

void Engine::hand_over(Running& running) {
  running.handed_over = true;
  const std::lock_guard lock(mutex_);
  bool all = false;
  for (Entry* entry : running.batch.entries) {
    auto& completions = entry->pending->completions;
    // Tensors of one submission are often members of one batch.
    if (completions.empty() || completions.back().owner != running.execution)
      completions.push_back({running.execution->completion_event(), running.execution});
    if (--entry->unqueued > 0 || !entry->submission.on_stream) continue;
    entry->pending->enqueued.store(true, std::memory_order_release);
    all = true;
  }
  if (all && waiters_ > 0) changed_.notify_all();
}

void Engine::finish(Running& running) {
  running.over = true;
  retire(running.batch.cut);
  const std::lock_guard lock(mutex_);
  for (Entry* entry : running.batch.entries) {
    if (const auto since = running.execution->copying_out_since(); since && entry->trace != 0 && entry->unfinished == 1)
      timeline().copying_out(entry->trace, since->time_since_epoch().count());
    if (--entry->unfinished == 0) finish_entry(*entry, {});
  }
}

void Engine::retire(const CutBatch& cut) {
  const std::lock_guard lock(mutex_);
  const bool first = !board_.batch(cut.sequence).retired.load(std::memory_order_acquire);
  if (first) {
    const BoardLock board_lock(board_);
    read_log();
    if (board_.retire_batch(cut.sequence, cut.scope == Scope::Domain)) cut_if_idle();
  }
  if (first) board_.ring_waiters();
  if (cut.scope == Scope::World) board_.ring_worker(0);
  board_.depart(cut.sequence, negotiator_.local_participants(cut.plan));
  if (board_.is_over(cut.sequence)) {
    // A cut may have been put off because the ring had no room. Under the lock, so that whoever puts it off sees this departure, or
    // this rank sees what was put off.
    const BoardLock board_lock(board_);
    read_log();
    cut_if_idle();
  }
}

void Engine::drive_relay(bool& progressed) {
  {
    const std::lock_guard lock(mutex_);
    for (auto& news : std::exchange(news_, {})) relay_->tell(std::move(news));
    progressed = relay_->advance() || progressed;
    if (relay_->is_root() && negotiator_.has_agreed(Scope::World)) {
      std::erase_if(open_world_cuts_, [this](const WorldCut& cut) {
        return !cut.here || board_.is_over(cut.sequence) || board_.batch(cut.sequence).retired.load();
      });
      if (open_world_cuts_.empty()) {
        relay_->announce_cut();
        with_log(0, [&] {
          const auto first = negotiator_.next_sequence();
          const bool here = negotiator_.takes_part_next(Scope::World);
          commit(Negotiator::cut_record(Scope::World));
          for (auto sequence = first; sequence < negotiator_.next_sequence(); ++sequence) open_world_cuts_.push_back({sequence, here});
        });
        progressed = true;
      }
    }
    if (relay_->is_root() && relay_->all_left() && !negotiator_.has_agreed(Scope::World) && !negotiator_.all_left()) {
      relay_->announce_end();
      with_log(0, [&] { commit(Negotiator::end()); });
    }
    progressed = relay_->advance() || progressed;
  }
}

bool Engine::must_poll() const {
  // What comes over a wire or from a device rings no bell here.
  if (parts_.transport) return true;
  return std::any_of(running_.begin(), running_.end(), [](const Running& running) { return !running.backend->rings(); });
}

void Engine::nap(std::uint32_t seen_bell, unsigned idle_rounds) {
  if (must_poll()) {
    if (idle_rounds < kYields && static_cast<unsigned>(parts_.topology.local_size) <= parts_.cores) return std::this_thread::yield();
    const auto pause = std::min<std::chrono::microseconds>(20us * (1U << std::min(idle_rounds / 64, 5U)), 500us);
    if (idle_rounds > 4) std::this_thread::sleep_for(pause);
    return;
  }
  if (static_cast<unsigned>(board_.ranks()) <= parts_.cores) {
    for (int i = 0; i < kSpins; ++i) {
      if (board_.wait_bell().load(std::memory_order_acquire) != seen_bell) return;
      cpu_relax();
    }
  }
  board_.sleep_waiting(seen_bell, kSleep);
}

namespace {
bool may_go_on(const Pending& pending) {
  return pending.done.load(std::memory_order_acquire) || pending.enqueued.load(std::memory_order_acquire);
}
}  // namespace

void Engine::wait(Pending& pending) {
  pending.waited_for.store(true, std::memory_order_relaxed);
  while (!may_go_on(pending)) {
    if (try_take_wheel()) {
      for (unsigned idle = 0; !may_go_on(pending);) {
        const std::uint32_t bell = board_.wait_bell().load(std::memory_order_seq_cst);
        if (drive_once()) {
          idle = 0;
        } else if (!may_go_on(pending)) {
          nap(bell, idle++);
          look_for_trouble();
        }
      }
      leave_wheel();
    } else {
      std::unique_lock lock(mutex_);
      ++waiters_;
      changed_.wait_for(lock, kSleep, [&] { return may_go_on(pending) || !wheel_taken_.load(); });
      --waiters_;
    }
  }
  if (pending.done.load(std::memory_order_acquire)) pending.status.raise();
}

bool Engine::poll(const Pending& pending) {
  if (may_go_on(pending)) return true;
  if (try_take_wheel()) {
    drive_once();
    leave_wheel();
  }
  return may_go_on(pending);
}

void Engine::coordinate() {
  pin_this_thread(parts_.config.thread_affinity, parts_.topology.local_rank);
  board_.begin_life();
  auto pause = kSleep;
  while (!stop_thread_.load() && !die_.load()) {
    const std::uint32_t bell = board_.work_bell(board_.self()).load(std::memory_order_seq_cst);
    pause = kSleep;
    if (try_take_wheel()) {
      for (int round = 0; round < 64 && drive_once(); ++round) {
      }
      look_for_trouble();
      bool outstanding = !running_.empty();
      const bool polls = must_poll();
      {
        const std::lock_guard lock(mutex_);
        outstanding = outstanding || (parts_.transport && (!ledger_.empty() || relay_->is_waiting()));
      }
      wheel_taken_.store(false, std::memory_order_release);
      {
        const std::lock_guard lock(mutex_);
        if (waiters_ > 0) changed_.notify_all();
      }
      if (outstanding) pause = polls ? 1ms : 10ms;
    }
    board_.sleep_working(bell, pause);
  }
  // A coordination thread that ends otherwise, with its process, leaves its life unended: the others read that as a death.
  if (stopped_cleanly_.load() && !die_.load()) board_.end_life();
}

// ---------------------------------------------------------------------------------------------------------------------- ends

void Engine::finish_entry(Entry& entry, Status status) {
  if (entry.lane != nullptr) {
    std::erase(in_lanes_, &entry);
    if (!status.ok() && entry.announced && board_.has_result(entry.unit)) return take_result(entry);  // it was done before that
  }
  entry.state = advance(entry.state, status.ok() ? EntryEvent::Finish : EntryEvent::Fail);
  release(entry);  // what never travelled: all of it after a failure, otherwise the tensors that nobody had
  if (entry.trace != 0) timeline().finished(entry.trace, status);
  const auto pending = entry.pending;
  std::unique_ptr<Entry> owned;
  if (entry.lane != nullptr && status.ok()) {
    entry.lane->place = ledger_.take_out(entry);
  } else {
    owned = ledger_.remove(entry);
    if (status.ok() && entry.repeats) make_lane(entry);
    if (!status.ok()) drop_lane(entry.key);
  }
  pending->status = std::move(status);
  pending->done.store(true, std::memory_order_release);
  if (waiters_ > 0) changed_.notify_all();
  if (!later_.empty()) {  // whoever drives next has something to announce
    board_.ring_waiters();
    board_.ring_worker(board_.self());
  }
}

void Engine::fail_what_was_never_agreed() {
  for (Entry* entry : ledger_.all()) {
    if (entry->state != EntryState::Waiting || !entry->announced) continue;
    finish_entry(*entry, {Status::Code::Shutdown, formatted("{} '{}' was pending when hvd::shutdown() was called", name_of(entry->key.kind),
                                                            display_name(entry->key.name))});
  }
}

void Engine::fail_later(const Status& status) {
  for (auto& [key, waiting] : later_) {
    for (auto& entry : waiting) {
      release(*entry);
      entry->pending->status = status;
      entry->pending->done.store(true, std::memory_order_release);
    }
  }
  later_.clear();
}

void Engine::fail_world(const Status& status) noexcept {
  board_.set_failure(status);
  fail_everything(board_.failure());
}

void Engine::fail_everything(const Status& status) noexcept {
  if (std::exchange(failure_handled_, true)) return;
  for (const auto& backend : parts_.backends) backend->abort();
  running_.clear();
  const std::lock_guard lock(mutex_);
  over_ = status;
  to_launch_.clear();
  for (Entry* entry : ledger_.all())
    if (entry->announced) finish_entry(*entry, status);  // the others' submitters find `over_` set
  fail_later(status);
  if (relay_) {
    try {
      relay_->failed(status);
      relay_->advance();
    } catch (...) {
      log(LogLevel::Warning, "the other hosts could not be told of the failure: {}", status_of_current_exception().text());
    }
  }
  changed_.notify_all();
}

void Engine::look_for_trouble() {
  const auto now = Clock::now();
  if (now - last_look_ < kLookInterval) return;
  last_look_ = now;
  if (board_.failed()) return;
  if (const auto dead = board_.find_dead()) {
    const int rank = parts_.topology.domain_ranks[static_cast<std::size_t>(*dead)];
    board_.set_failure({Status::Code::RankFailed, formatted("rank {} died, or ended without hvd::shutdown()", rank)});
    return;
  }
  look_for_conflicts();
  report_stalls();
}

std::vector<Claim> Engine::stuck_here(int process_set, const std::string& name) const {
  std::vector<Claim> claims;
  const auto units = negotiator_.units_of(process_set, name);
  const auto& ranks = negotiator_.process_set(process_set).ranks;
  const auto& domain = parts_.topology.domain_ranks;
  for (std::size_t index = 0; index < domain.size(); ++index) {
    if (!std::binary_search(ranks.begin(), ranks.end(), domain[index])) continue;
    const auto is_stuck = [&](const Unit* unit) {
      return board_.is_stuck(unit->id, static_cast<int>(index), unit->scope == Scope::World && unit->undecided);
    };
    const auto stuck = std::find_if(units.begin(), units.end(), is_stuck);
    if (stuck == units.end()) return {};
    claims.push_back({domain[index], (*stuck)->key.kind});
  }
  return claims;
}

void Engine::look_for_conflicts() {
  // Different operations under one name are separate submissions, which may legally come in any order. They are taken for a
  // disagreement only when all ranks of the set have waited under the name for a while, and no operation has them all.
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  ledger_.for_each([&](const Entry& entry) {
    if (entry.state != EntryState::Waiting || !entry.announced || now - entry.since < kConflictTime) return;
    if (entry.pending->waited_for.load(std::memory_order_relaxed)) board_.set_stuck(entry.unit);
  });
  for (const auto& [set, name] : negotiator_.ambiguous_names()) {
    if (negotiator_.scope_of(set) == Scope::World) {
      if (!relay_) continue;
      if (const auto claims = stuck_here(set, name); !claims.empty()) relay_->stuck(set, name, claims);
    } else if (negotiator_.process_set(set).rank >= 0) {
      with_log(256 + name.size() + 16 * static_cast<std::size_t>(board_.ranks()), [&] {
        const auto claims = stuck_here(set, name);
        const auto differs = [&](const Claim& claim) { return claim.kind != claims.front().kind; };
        if (std::any_of(claims.begin(), claims.end(), differs)) commit_conflict(set, name, claims);
      });
    }
  }
}

void Engine::commit_conflict(int process_set, const std::string& name, const std::vector<Claim>& claims) {
  for (const Unit* unit : negotiator_.units_of(process_set, name)) {
    const auto of_it = [&](const Claim& claim) { return claim.kind == unit->key.kind; };
    if (std::any_of(claims.begin(), claims.end(), of_it)) board_.void_slot(unit->id, unit->slots);
  }
  commit(Negotiator::conflict(process_set, name, claims));
}

std::string Engine::blame(const Entry& entry) const {
  const auto& set = negotiator_.process_set(entry.key.process_set);
  const auto& domain = parts_.topology.domain_ranks;
  const auto& joined = negotiator_.joined(entry.key.process_set);
  std::vector<int> missing;
  for (std::size_t i = 0; i < domain.size(); ++i)
    if (std::binary_search(set.ranks.begin(), set.ranks.end(), domain[i]) && !board_.has_arrived_too(entry.unit, static_cast<int>(i)) &&
        (entry.key.kind == OpKind::Join || !std::binary_search(joined.begin(), joined.end(), domain[i])))
      missing.push_back(domain[i]);
  std::string text;
  if (!missing.empty()) {
    text = formatted("rank{} {} {} not submitted it", missing.size() == 1 ? "" : "s", rank_list(missing),
                     missing.size() == 1 ? "has" : "have");
  } else if (const auto awaited = relay_ ? relay_->awaited(entry.key) : missing; awaited.size() == 1) {
    text = formatted("rank {}, on another host, has not submitted it", awaited.front());
  } else if (!awaited.empty()) {
    text = formatted("some of ranks {}, on other hosts, have not submitted it", rank_list(awaited));
  }
  for (const Unit* other : negotiator_.units_of(entry.key.process_set, entry.key.name)) {
    std::vector<int> there;
    for (std::size_t i = 0; other->id != entry.unit && i < domain.size(); ++i)
      if (board_.has_arrived(other->id, static_cast<int>(i))) there.push_back(domain[i]);
    if (!there.empty())
      text += formatted("{}rank{} {} wait{} for {} of that name", text.empty() ? "" : "; ", there.size() == 1 ? "" : "s", rank_list(there),
                        there.size() == 1 ? "s" : "", name_of(other->key.kind));
  }
  return text;
}

void Engine::report_stalls() {
  const Config& config = parts_.config;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (int other = 0; negotiator_.any_left() && other < parts_.topology.size; ++other)
    if (negotiator_.left()[static_cast<std::size_t>(other)]) fail_what_waits_for(other);
  ledger_.for_each([&](Entry& entry) {
    if (entry.state != EntryState::Waiting || !entry.announced || board_.failed()) return;
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - entry.since);
    const bool due = !config.stall_check_disable && now - entry.reported >= config.stall_check_time;
    bool over = config.stall_shutdown_time > 0s && waited >= config.stall_shutdown_time;
    if (!over && !due) return;
    const std::string culprits = blame(entry);
    // Whoever can name them has the first word.
    over = over && (!culprits.empty() || waited >= config.stall_shutdown_time + kGraceForDecisions);
    if (!over && !due) return;
    entry.reported = now;
    const std::string text = formatted("{} '{}' has waited {} s: {}", name_of(entry.key.kind), display_name(entry.key.name), waited.count(),
                                       culprits.empty() ? "ranks on other hosts have not submitted it" : culprits);
    if (over) {
      board_.set_failure({Status::Code::StallTimeout, text});
      return;
    }
    log(LogLevel::Warning, "{}", text);
  });
}

bool Engine::shutdown(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopping_, true)) return stopped_cleanly_.load();
    if (!board_.failed()) {
      try {
        with_log(64, [this] { commit(Negotiator::leaving(parts_.topology.rank)); });
      } catch (...) {
        board_.set_failure(status_of_current_exception());
      }
    }
  }
  board_.ring_waiters();
  board_.ring_all_workers();
  const auto is_over = [this, deadline] {
    if (failure_handled_ || Clock::now() > deadline) return true;
    const std::lock_guard lock(mutex_);
    return negotiator_.all_left() && ledger_.empty() && later_.empty() && news_.empty();
  };
  while (!try_take_wheel()) std::this_thread::sleep_for(50us);
  for (unsigned idle = 0; !is_over();) {
    const std::uint32_t bell = board_.wait_bell().load(std::memory_order_seq_cst);
    if (drive_once()) {
      idle = 0;
    } else if (!is_over()) {
      nap(bell, idle++);
      look_for_trouble();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_cleanly_.store(!board_.failed() && negotiator_.all_left());
    if (board_.failed()) log(LogLevel::Warning, "shut down after a failure: {}", board_.failure().text());
    if (over_.ok()) over_ = {Status::Code::Shutdown, "hvd::shutdown() has been called"};
    for (Entry* entry : ledger_.all())
      if (entry->announced) finish_entry(*entry, over_);
    fail_later(over_);
  }
  stop_thread_.store(true);
  board_.ring_worker(board_.self());
  timeline().stop();
  // The wheel stays taken: nothing is driven any more.
  return stopped_cleanly_.load();
}

}  // namespace hvd
