#include "hvd/engine/engine.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "hvd/base/affinity.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine_parts.h"

namespace hvd {

namespace {

constexpr auto kSleep = 100ms;
// A leader's coordination thread must look for what other hosts' ranks wait for, also while its own have nothing to do: a message rings no
// bell here. How often while there is traffic, or was in the last second; and how often otherwise, or while a user's thread does it.
constexpr auto kLeaderPause = 1ms;
constexpr auto kIdleLeaderPause = 10ms;
constexpr auto kTrafficMemory = 1s;
constexpr unsigned kYields = 400;  // before sleeping, for what must be polled: 4 B over MPI, 2 ranks, 35 us instead of 296

}  // namespace

Engine::Engine(EngineParts parts)
    : parts_(std::move(parts)),
      board_(*parts_.board),
      spare_cores_(parts_.cores > static_cast<unsigned>(board_.ranks())),
      negotiator_(parts_.topology, parts_.process_sets, parts_.config.fusion_threshold_bytes, board_.slots(),
                  parts_.config.disable_group_fusion),
      last_look_(Clock::now()) {
  const Config& config = parts_.config;
  board_.set_lock_patience(
      {parts_.topology.domain_ranks, config.stall_check_disable ? 0s : config.stall_check_time, config.stall_shutdown_time});
  if (parts_.transport) {
    LeaderTreeActions actions;
    actions.introduce = [this](const UnitKey& key, const Runs& ranks, const Signature& signature) {
      introduce_remote(key, ranks, signature);
    };
    actions.agree = [this](const UnitKey& key, const Agreement& what) { agree_by_root(key, what); };
    actions.cut = [this] { return cut_world(); };
    actions.leave = [this](int rank) { with_log(0, [&] { commit(Negotiator::leaving(rank)); }); };
    actions.fail = [this](const Status& status) { board_.set_failure(status); };
    actions.refuse = [this](const UnitKey& key, int rank) { refuse_by_root(key, rank); };
    actions.end = [this] { with_log(0, [&] { commit(Negotiator::end()); }); };
    actions.conflict = [this](int set, const std::string& name, const std::vector<StuckRank>& stuck_ranks) {
      with_log(0, [&] { commit_conflict(set, name, stuck_ranks); });
    };
    actions.drop = [this](const UnitKey& key) { return drop_unit(key); };
    actions.ranks_of = [this](int set) { return negotiator_.ranks_unless_removed(set); };
    actions.domain_of = [this](int rank) { return parts_.topology.domain_of_rank[static_cast<std::size_t>(rank)]; };
    leader_tree_ = std::make_unique<LeaderTree>(*parts_.transport, std::move(actions), board_.slots());
  }
  const auto ranks = static_cast<std::size_t>(board_.ranks());
  in_fast_path_.reserve(kUnnamedNames);
  fast_ranks_.reserve(ranks);
  fast_locations_.reserve(ranks);
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

// ------------------------------------------------------------------------------------------------------------------- driving

bool Engine::try_take_turn() {
  bool expected = false;
  return !turn_taken_.load(std::memory_order_relaxed) && turn_taken_.compare_exchange_strong(expected, true, std::memory_order_acquire);
}

void Engine::leave_turn() {
  const bool unfinished = !running_.empty();
  turn_taken_.store(false, std::memory_order_release);
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

bool Engine::progress() noexcept {
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
      if (std::exchange(somebody_left_, false)) doubt_all();
      if (negotiator_.has_removed_sets()) bury_removed_sets();
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
    if (leader_tree_) drive_leader_tree(progressed);
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
  member.padded = tensor.padded;
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
  board_.depart(cut.sequence, negotiator_.local_participants(cut.plan));
  if (cut.scope == Scope::World) board_.ring_worker(0);  // there may be room now for what the root has decided
  if (board_.is_over(cut.sequence)) {
    // A cut may have been put off because the ring had no room. Under the lock, so that whoever puts it off sees this departure, or
    // this rank sees what was put off.
    const BoardLock board_lock(board_);
    read_log();
    cut_if_idle();
  }
}

bool Engine::cut_world() {
  bool cut = false;
  with_log(0, [&] {
    const auto first = negotiator_.next_sequence();
    // A domain that takes no part in what is cut needs no room for it.
    const bool opens = negotiator_.has_agreed(Scope::World) && negotiator_.takes_part_next(Scope::World);
    if (opens && !board_.can_open(first, kDataTypes)) return;
    if (leader_tree_->is_root()) leader_tree_->announce_cut();
    commit(Negotiator::cut_record(Scope::World));
    if (leader_tree_->is_root())
      for (auto sequence = first; sequence < negotiator_.next_sequence(); ++sequence) open_world_cuts_.push_back({sequence, opens});
    cut = true;
  });
  // A rank has not looked at its results for a long time. Said once, or those that can do nothing about it would never sleep.
  if (!cut && !std::exchange(told_of_no_room_, true))
    for (int rank = 0; rank < board_.ranks(); ++rank)
      if (rank != board_.self()) board_.ring_worker(rank);
  if (cut) told_of_no_room_ = false;
  return cut;
}

void Engine::drive_leader_tree(bool& progressed) {
  {
    const std::lock_guard lock(mutex_);
    while (!local_events_.empty()) {  // one by one: what follows from one may make void what comes after it
      LocalEvent event = std::move(local_events_.front());
      local_events_.pop_front();
      leader_tree_->tell(std::move(event));
    }
    progressed = leader_tree_->advance() || progressed;
    if (leader_tree_->is_root() && negotiator_.has_agreed(Scope::World)) {
      std::erase_if(open_world_cuts_, [this](const WorldCut& cut) {
        return !cut.here || board_.is_over(cut.sequence) || board_.batch(cut.sequence).retired.load();
      });
      if (open_world_cuts_.empty() && cut_world()) progressed = true;
    }
    if (leader_tree_->is_root() && leader_tree_->all_left() && !negotiator_.has_agreed(Scope::World) && !negotiator_.all_left()) {
      leader_tree_->announce_end();
      with_log(0, [&] { commit(Negotiator::end()); });
    }
    progressed = leader_tree_->advance() || progressed;
    if (progressed) last_traffic_ = Clock::now();
  }
}

bool Engine::must_poll() const {
  // What comes over a wire or from a device rings no bell here.
  if (parts_.transport) return true;
  return std::any_of(running_.begin(), running_.end(), [](const Running& running) { return !running.backend->notifies(); });
}

void Engine::idle_wait(std::uint32_t seen_bell, unsigned idle_rounds) {
  if (must_poll()) {
    if (idle_rounds < kYields && static_cast<unsigned>(parts_.topology.local_size) <= parts_.cores) return std::this_thread::yield();
    const auto pause = std::min<std::chrono::microseconds>(20us * (1U << std::min(idle_rounds / 64, 5U)), 500us);
    if (idle_rounds > 4) std::this_thread::sleep_for(pause);
    return;
  }
  if (static_cast<unsigned>(board_.ranks()) <= parts_.cores) {
    for (int i = 0; i < kSpins; ++i) {
      if (board_.wait_doorbell().load(std::memory_order_acquire) != seen_bell) return;
      cpu_relax();
    }
  }
  board_.sleep_waiting(seen_bell, kSleep);
}

namespace {
bool may_go_on(const HandleState& pending) {
  return pending.done.load(std::memory_order_acquire) || pending.enqueued.load(std::memory_order_acquire);
}
}  // namespace

void Engine::wait(HandleState& pending) {
  pending.waited_for.store(true, std::memory_order_relaxed);
  while (!may_go_on(pending)) {
    if (try_take_turn()) {
      for (unsigned idle = 0; !may_go_on(pending);) {
        const std::uint32_t bell = board_.wait_doorbell().load(std::memory_order_seq_cst);
        if (progress()) {
          idle = 0;
        } else if (!may_go_on(pending)) {
          idle_wait(bell, idle++);
          look_for_trouble();
        }
      }
      leave_turn();
    } else {
      std::unique_lock lock(mutex_);
      ++waiters_;
      changed_.wait_for(lock, kSleep, [&] { return may_go_on(pending) || !turn_taken_.load(); });
      --waiters_;
    }
  }
  if (pending.done.load(std::memory_order_acquire)) pending.status.raise();
}

bool Engine::poll(const HandleState& pending) {
  if (may_go_on(pending)) return true;
  if (try_take_turn()) {
    progress();
    leave_turn();
  }
  return may_go_on(pending);
}

void Engine::coordinate() {
  pin_this_thread(parts_.config.thread_affinity, parts_.topology.local_rank);
  board_.begin_life();
  std::chrono::milliseconds pause = kSleep;
  while (!stop_thread_.load() && !die_.load()) {
    const std::uint32_t bell = board_.work_doorbell(board_.self()).load(std::memory_order_seq_cst);
    pause = parts_.transport ? kIdleLeaderPause : kSleep;
    if (try_take_turn()) {
      for (int round = 0; round < 64 && progress(); ++round) {
      }
      look_for_trouble();
      bool outstanding = !running_.empty();
      const bool polls = must_poll();
      {
        const std::lock_guard lock(mutex_);
        const bool uncut = leader_tree_ && leader_tree_->is_root() && negotiator_.has_agreed(Scope::World);
        outstanding = outstanding || uncut || (parts_.transport && (!ledger_.empty() || leader_tree_->is_waiting()));
      }
      turn_taken_.store(false, std::memory_order_release);
      {
        const std::lock_guard lock(mutex_);
        if (waiters_ > 0) changed_.notify_all();
      }
      if (outstanding) pause = polls ? 1ms : 10ms;
      if (parts_.transport && Clock::now() - last_traffic_ < kTrafficMemory) pause = kLeaderPause;
    }
    board_.sleep_working(bell, pause);
  }
  // A coordination thread that ends otherwise, with its process, leaves its life unended: the others read that as a death.
  if (stopped_cleanly_.load() && !die_.load()) board_.end_life();
}

}  // namespace hvd
