// Tested in tests/contract/endpoint_front.cc, tests/torch_bindings/collectives/world_test.cc

#include "hvd/hvd.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/api/joins.h"
#include "hvd/api/world.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/base/wire.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/engine/engine.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

/// Keeps the engine meanwhile: another thread may leave the world.
std::shared_ptr<const Topology> topology() {
  const auto running = engine();
  return {running, &running->topology()};
}

/// Whatever world this thread's calls mean.
std::shared_ptr<const ProcessSetInfo> info(const ProcessSet& set) {
  auto found = world_of(set)->engine->negotiator().sets().share(set.id());
  if (!found) throw InvalidArgument(formatted("there is no process set {}", set.id()));
  return found;
}

std::int64_t control(std::string_view name, Shape ranks, int root) {
  Submission submission;
  submission.kind = OpKind::Control;
  submission.name = name;
  submission.root = root;
  submission.tensors.push_back(
      {nullptr, nullptr, DataType::Int64, std::move(ranks), nullptr, true});
  return submit_and_wait(std::move(submission))->value;
}

}  // namespace

bool is_initialized() { return current_world_if_any() != nullptr; }

int rank() { return topology()->rank; }
int size() { return topology()->size; }
int local_rank() { return topology()->local_rank; }
int local_size() { return topology()->local_size; }
int cross_rank() { return topology()->cross_rank; }
int cross_size() { return topology()->cross_size; }
bool is_homogeneous() { return topology()->homogeneous; }
bool mpi_threads_supported() { return current_world()->mpi_threads; }
std::string backend_description() { return current_world()->description; }
Stats stats() { return current_world()->engine->stats(); }

void abort(const std::string& reason) { abort_engine(*engine(), reason); }
void abort_engine(Engine& running, const std::string& reason) {
  running.abort({Status::Code::RankFailed,
                 formatted("rank {} called hvd::abort(): {}", running.topology().rank, reason)});
}

void start_timeline(const std::string& path, const TimelineOptions& options) {
  const LibraryCall call;
  const auto running = engine();
  const auto exchange = [&running](const Bytes& mine) {
    return gather_bytes(*running, mine, library_name("start_timeline"));
  };
  std::vector<std::string> paths;
  for (const auto& said : exchange(Writer().put_string(path).take()))
    paths.push_back(formatted("'{}'", Reader(said).get_string()));
  if (std::ranges::adjacent_find(paths, std::not_equal_to<>()) != paths.end())
    throw Mismatch(formatted("start_timeline: the path must be equal on all ranks: {}",
                             grouped_by_rank(ProcessSet().ranks(), paths)));
  running->timeline().start(path, options, running->config().timeline_max_bytes,
                            running->topology(), exchange);
}
void stop_timeline() {
  const LibraryCall call;
  if (const auto world = current_world_if_any()) world->engine->timeline().stop();
}

std::shared_ptr<void> allocate_shared(std::size_t bytes) {
  const LibraryCall call;
  const auto world = current_world();
  return world->allocate_shared ? world->allocate_shared(bytes) : nullptr;
}

std::shared_ptr<void> allocate_on_device(std::size_t bytes, Device device, DataType dtype,
                                         const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  Submission like;
  like.process_set = options.process_set.id();
  like.op = options.op;
  like.device = device;
  return engine()->allocate(like, dtype, bytes);
}

int ProcessSet::rank() const {
  return id_ == 0 ? world_of(*this)->engine->topology().rank : info(*this)->rank;
}
int ProcessSet::size() const {
  return id_ == 0 ? world_of(*this)->engine->topology().size
                  : static_cast<int>(info(*this)->ranks.size());
}
bool ProcessSet::included() const { return info(*this)->rank >= 0; }
std::vector<int> ProcessSet::ranks() const { return info(*this)->ranks; }
ProcessSet global_process_set() { return {}; }
ProcessSet process_set(int id) {
  const ProcessSet set(id, id == 0 ? ProcessSet::kAnyWorld : current_world_number());
  info(set);
  return set;
}

void wait_for(Engine& engine, HandleState& pending) { engine.wait(pending); }
bool wait_for(Engine& engine, HandleState& pending, std::chrono::nanoseconds time) {
  constexpr std::chrono::nanoseconds kLongestPause = std::chrono::microseconds(100);
  const auto begin = std::chrono::steady_clock::now();
  for (std::chrono::nanoseconds pause = std::chrono::microseconds(5);;
       pause = std::min(2 * pause, kLongestPause)) {
    if (engine.poll(pending)) return true;
    const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin;
    if (spent >= time) return false;
    std::this_thread::sleep_for(std::min(pause, time - spent));
  }
}
bool poll_for(Engine& engine, HandleState& pending) { return engine.poll(pending); }
void call_after(Engine& engine, HandleState& pending, std::function<void()> function) {
  engine.then(pending, std::move(function));
}

ProcessSet add_process_set(const std::vector<int>& ranks) {
  Shape ordered(ranks.begin(), ranks.end());
  std::sort(ordered.begin(), ordered.end());
  const bool distinct = std::adjacent_find(ordered.begin(), ordered.end()) == ordered.end();
  if (ordered.empty() || !distinct || ordered.front() < 0 || ordered.back() >= size())
    throw InvalidArgument(formatted("add_process_set: {} must be distinct ranks from 0 to {}",
                                    to_string(Shape(ranks.begin(), ranks.end())), size() - 1));
  return ProcessSet(static_cast<int>(control(kAddProcessSet, std::move(ordered), 0)),
                    current_world_number());
}

void remove_process_set(const ProcessSet& process_set) {
  require_running();
  require_current_world(process_set);
  if (process_set.id() == 0)
    throw InvalidArgument("remove_process_set: the global process set cannot be removed");
  const auto ranks = process_set.ranks();
  control(kRemoveProcessSet, Shape(ranks.begin(), ranks.end()), process_set.id());
}

int join(const ProcessSet& process_set) {
  return static_cast<int>(
      submit_and_wait(request(OpKind::Join, SetOptions{kJoin, process_set}))->value);
}
Handle<int> join_async(const ProcessSet& process_set) {
  auto running = engine();
  auto pending = running->submit(request(OpKind::Join, SetOptions{kJoin, process_set}));
  const auto last = [state = pending] { return static_cast<int>(state->value); };
  return {std::move(running), std::move(pending), last};
}

bool note_joins(const ProcessSet& process_set, std::uint64_t& noted) {
  const auto world = current_world_if_any();
  const auto ended = world ? world->engine->negotiator().sets().joins(process_set.id()) : 0;
  return std::exchange(noted, ended) != ended;
}

void barrier(const ProcessSet& process_set) {
  const SetOptions options{{}, process_set};
  if (try_fast_path(small_request(OpKind::Barrier, options))) return;
  submit_and_wait(request(OpKind::Barrier, options));
}
Handle<void> barrier_async(const ProcessSet& process_set) {
  return submit_only(request(OpKind::Barrier, SetOptions{{}, process_set}));
}

}  // namespace hvd
