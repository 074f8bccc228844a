#include "hvd/api/world.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/api/world_life.h"
#include "hvd/base/callback_thread.h"
#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/base/threads.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/hvd.h"

namespace hvd {

namespace {

struct Global {
  std::mutex mutex;
  std::mutex ending;    // before `mutex`: held while a thread ends the world in order
  std::thread lasting;  // of the one before, which others still need; under `ending`
  std::shared_ptr<RunningWorld> world;
  // Of `world`, so far: the number of the one that is there now. Worlds as values have lower ones.
  std::atomic<std::uint64_t> changes{std::uint64_t{1} << 63};
  std::vector<std::function<void()>> hooks;
};

/// Never destroyed: a process that ends without shutdown() ends as it is, which tells the others.
Global& global() {
  static auto* const instance = [] {
    // A fork() must not come while another thread of the process, which the child will not have,
    // holds the mutex. This thread may hold it where a signal handler forks.
    static constexpr auto lock = [] {
      if (!is_inside_library()) global().mutex.lock();
    };
    static constexpr auto unlock = [] {
      if (!is_inside_library()) global().mutex.unlock();
    };
    ::pthread_atfork(lock, unlock, unlock);
    return new Global;
  }();
  return *instance;
}

/// Puts another world, or none, in place of the one there, and returns that. Requires the mutex.
std::shared_ptr<RunningWorld> exchange_world(std::shared_ptr<RunningWorld> next) {
  global().changes.fetch_add(1);
  return std::exchange(global().world, std::move(next));
}

std::shared_ptr<RunningWorld> take_world() {
  const std::lock_guard lock(global().mutex);
  return exchange_world(nullptr);
}

/// Has another thread end the world. Returns false if there can be none.
bool leave_to_thread(const std::shared_ptr<RunningWorld>& world) {
  try {
    const SignalsKeptOff of_it;
    global().lasting = std::thread([world] { end_in_order(*world); });
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

/// Waits until the one before has ended. Requires `ending`.
void join_lasting() {
  if (global().lasting.joinable()) global().lasting.join();
}

/// Ends the world as `shutdown()` does, in one thread at a time: the others find no world when
/// their turn comes. Returns the world that has ended, here at least. `waits`: on all ranks,
/// however long that takes.
std::shared_ptr<RunningWorld> end_world(bool waits) {
  std::unique_lock ending(global().ending, std::defer_lock);
  // the thread that has it waits for the functions that follow operations: this may be one
  if (waits || !CallbackThread::is_here()) {
    ending.lock();
  } else if (!ending.try_lock()) {
    return nullptr;
  }
  std::shared_ptr<RunningWorld> world;
  {
    const std::lock_guard lock(global().mutex);
    world = global().world;
  }
  if (waits) join_lasting();
  if (!world) return nullptr;
  const bool is_over = waits || !world->may_end_later || world->engine->leave(WorldLife::kPatience);
  const bool lasts = !is_over && leave_to_thread(world);
  const bool clean = !lasts && world->engine->shutdown();
  {
    const std::lock_guard lock(global().mutex);
    if (global().world == world) exchange_world(nullptr);
  }
  if (!lasts && world->close) world->close(clean);
  return world;
}

/// The world that a thread has found, so that it needs no lock to find it again.
struct Known {
  std::uint64_t changes = 0;
  std::weak_ptr<RunningWorld> world;
  Known() = default;
  Known(const Known&) = delete;
  Known& operator=(const Known&) = delete;
  ~Known() { is_gone = true; }
  // destructors of what lives longer may still call the library
  static thread_local constinit bool is_gone;
};
thread_local constinit bool Known::is_gone = false;

std::shared_ptr<RunningWorld> find_world() {
  const std::lock_guard lock(global().mutex);
  if (!global().world)
    throw NotInitialized("hvd::init() has not been called, or hvd::shutdown() has");
  return global().world;
}

}  // namespace

std::shared_ptr<RunningWorld> current_world() {
  const LibraryCall call;
  if (chosen_world() != nullptr) return chosen_world()->running();
  if (Known::is_gone) return find_world();
  static thread_local Known known;
  const std::uint64_t changes = global().changes.load(std::memory_order_acquire);
  if (changes == known.changes)
    if (auto world = known.world.lock()) return world;
  auto world = find_world();
  known.world = world;
  known.changes = changes;
  return world;
}

void require_running() { static_cast<void>(current_world()); }

std::shared_ptr<RunningWorld> current_world_if_any() {
  if (is_forked_from_rank()) return nullptr;
  const InsideLibrary inside;
  if (chosen_world() != nullptr) return chosen_world()->running_if_any();
  const std::lock_guard lock(global().mutex);
  return global().world;
}

bool try_fast_path(const SmallCall& call) {
  return current_world()->engine->small_calls().try_run(call);
}

std::shared_ptr<ResultPool> result_pool() {
  const auto world = current_world_if_any();
  return world ? world->results : nullptr;
}

void install_world(RunningWorld world) {
  std::vector<std::function<void()>> hooks;
  {
    const std::lock_guard lock(global().mutex);
    if (global().world) throw InvalidArgument("hvd is running already");
    become_rank(world.engine->topology().rank);
    world.engine->enter_init_thread();
    exchange_world(std::make_shared<RunningWorld>(std::move(world)));
    hooks = global().hooks;
  }
  // init() may be called inside of another world's
  const WorldScope scope(World(), WorldScope::kAlsoGlobal);
  for (const auto& hook : hooks) hook();
}

bool has_world() {
  if (is_forked_from_rank()) return false;
  const InsideLibrary inside;
  const std::lock_guard lock(global().mutex);
  return global().world != nullptr;
}

void on_init(std::function<void()> hook) {
  const std::lock_guard lock(global().mutex);
  global().hooks.push_back(std::move(hook));
}

void await_end_of_world() {
  if (is_forked_from_rank()) return;
  const std::lock_guard ending(global().ending);
  join_lasting();
}

void shutdown() {
  if (is_forked_from_rank()) return;  // the world is its parent's
  const InsideLibrary inside;
  const auto ended = end_world(false);
  if (ended && !ended->has_peers) cease_to_be_rank();
}

void leave_world() noexcept {
  try {
    const InsideLibrary inside;
    static_cast<void>(end_world(true));
  } catch (...) {
    log(LogLevel::Error, "at the end of the process: {}", status_of_current_exception().text());
  }
}

void desert_world(int exit_status) noexcept {
  const auto world = take_world();
  if (!world) {  // this rank may have left it in order, whatever its status
    const std::unique_lock ending(global().ending, std::try_to_lock);
    if (ending.owns_lock()) join_lasting();
    return;
  }
  try {
    const InsideLibrary inside;
    const bool told = world->engine->desert(
        {Status::Code::RankFailed,
         formatted("rank {} ended with exit status {} without hvd::shutdown()",
                   world->engine->topology().rank, exit_status)});
    if (told && world->flush) world->flush();
    // threads of this rank may still use it
    static auto* const kept = new std::shared_ptr<RunningWorld>;
    *kept = world;
  } catch (...) {
    log(LogLevel::Error, "at the end of the process: {}", status_of_current_exception().text());
  }
}

std::uint64_t current_world_number() {
  return chosen_world() != nullptr ? chosen_world()->number() : global().changes.load();
}

std::shared_ptr<RunningWorld> world_of(const ProcessSet& set) {
  const std::uint64_t number = set.world_number();
  if (number == ProcessSet::kAnyWorld || number == current_world_number()) return current_world();
  const LibraryCall call;
  if (number == global().changes.load()) return find_world();
  if (const auto life = WorldLife::find(number)) return life->running();
  throw NotInitialized(formatted("the world of process set {} has ended", set.id()));
}

void require_set_of_current_world(const ProcessSet& set) {
  if (set.world_number() == ProcessSet::kAnyWorld || set.world_number() == current_world_number())
    return;
  require_running();
  throw InvalidArgument(
      formatted("process set {} is one of another world, or of one that has "
                "ended; make it in the world of the operation",
                set.id()));
}

std::shared_ptr<Engine> engine() { return current_world()->engine; }

}  // namespace hvd
