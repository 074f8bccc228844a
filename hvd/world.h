#pragma once
/// This header has worlds as values: a program may have any number of them beside the global one
/// that `init()` makes, of any members, also without a global one. What they mean:
/// docs/semantics.md, "Worlds".
// Tested in tests/ops/worlds_test.cc

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/config.h"
#include "hvd/stats.h"

#pragma GCC visibility push(default)
namespace hvd {

class WorldLife;
class ProcessSet;
struct Buffer;

/// OptionsOf has the types of the options that operations on such an input take; front ends say
/// theirs by a specialisation.
template <class Input>
struct OptionsOf;

/// @cond
// The operations of hvd/hvd.h and <hvd/torch.h>, and what their options are called.
#define HVD_OPERATIONS(X)                    \
  X(allreduce, Allreduce)                    \
  X(allreduce_, Allreduce)                   \
  X(allreduce_async, Allreduce)              \
  X(allreduce_async_, Allreduce)             \
  X(allreduce_init, Allreduce)               \
  X(grouped_allreduce, Allreduce)            \
  X(grouped_allreduce_, Allreduce)           \
  X(grouped_allreduce_async, Allreduce)      \
  X(grouped_allreduce_async_, Allreduce)     \
  X(sparse_allreduce, Allreduce)             \
  X(sparse_allreduce_async, Allreduce)       \
  X(send, Peer)                              \
  X(send_async, Peer)                        \
  X(recv, Peer)                              \
  X(recv_async, Peer)                        \
  X(broadcast, Broadcast)                    \
  X(broadcast_, Broadcast)                   \
  X(broadcast_async, Broadcast)              \
  X(broadcast_async_, Broadcast)             \
  X(broadcast_init, Broadcast)               \
  X(allgather, Allgather)                    \
  X(allgather_async, Allgather)              \
  X(allgather_into, Allgather)               \
  X(allgather_into_async, Allgather)         \
  X(allgather_init, Allgather)               \
  X(grouped_allgather, Allgather)            \
  X(grouped_allgather_async, Allgather)      \
  X(alltoall, Alltoall)                      \
  X(alltoall_async, Alltoall)                \
  X(alltoall_into, Alltoall)                 \
  X(alltoall_into_async, Alltoall)           \
  X(alltoall_init, Alltoall)                 \
  X(reducescatter, Reducescatter)            \
  X(reducescatter_async, Reducescatter)      \
  X(reducescatter_into, Reducescatter)       \
  X(reducescatter_into_async, Reducescatter) \
  X(reducescatter_init, Reducescatter)       \
  X(grouped_reducescatter, Reducescatter)    \
  X(grouped_reducescatter_async, Reducescatter)

namespace detail {
// Call_allreduce and the others find the function of their name by its arguments.
#define HVD_CALL_BY_NAME(operation, kind)                      \
  struct Call_##operation {                                    \
    template <class... Arguments>                              \
    auto operator()(Arguments&&... arguments) const {          \
      return operation(std::forward<Arguments>(arguments)...); \
    }                                                          \
  };
HVD_OPERATIONS(HVD_CALL_BY_NAME)
HVD_CALL_BY_NAME(barrier_async, Barrier)
HVD_CALL_BY_NAME(join_async, Join)
HVD_CALL_BY_NAME(broadcast_object, Object)
HVD_CALL_BY_NAME(allgather_object, Object)
#undef HVD_CALL_BY_NAME
}  // namespace detail
/// @endcond

/// A Rendezvous is how the members of a world find one another: who this one is, and a store of
/// keys that all of them reach. The three functions are called by the thread that makes the world,
/// and later, one at a time, by those that work for it; what they throw ends the call as
/// BackendError. The store sees a few requests per member, and keeps about twenty keys per world,
/// which begin with `name`.
struct Rendezvous {
  /// Value is what the store keeps under a key.
  using Value = std::vector<std::uint8_t>;
  int rank = 0;        ///< this member's number in the world, from 0
  int size = 1;        ///< the number of members
  std::string name{};  ///< tells the world from others in the same store, and in messages; the same
                       ///< on all members, never used twice
  /// Sets a key, which has not been set before.
  std::function<void(const std::string& key, const Value& value)> set{};
  /// Returns a key's value as soon as somebody has set it; nullopt where nobody has in time.
  std::function<std::optional<Value>(const std::string& key, std::chrono::milliseconds time)> get{};
  /// Adds to a number, which is 0 at first, and returns the sum, as one step.
  std::function<std::int64_t(const std::string& key, std::int64_t amount)> add{};
};

/// Returns the Rendezvous over what `store` points to, which has the functions of LibTorch's
/// `c10d::Store` (TCPStore, FileStore, HashStore, PrefixStore).
template <class StorePointer>
Rendezvous rendezvous_in(StorePointer store, int rank, int size, std::string name) {
  Rendezvous made;
  made.rank = rank;
  made.size = size;
  made.name = std::move(name);
  made.set = [store](const std::string& key, const Rendezvous::Value& value) {
    store->set(key, value);
  };
  made.get = [store](const std::string& key,
                     std::chrono::milliseconds time) -> std::optional<Rendezvous::Value> {
    const auto deadline = std::chrono::steady_clock::now() + time;
    // its own wait() says only by an exception, which may be another one, that the time is over
    for (;;) {
      if (store->check(std::vector<std::string>{key})) return store->get(key);
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  made.add = [store](const std::string& key, std::int64_t amount) {
    return store->add(key, amount);
  };
  return made;
}

/// A World is a group of ranks with its own memory, coordination thread, failure and end. Copies
/// stand for the same world, and so does a value that was moved from; with the last of them it is
/// left. Its functions may be called by any thread. They throw NotInitialized once this member has
/// left it, and in a process that was forked from a member. Operations of a world are the free
/// functions called for it: as members, by `options.world`, or inside of a WorldScope. Handles, and
/// persistent operations, stay with the world that they were made in.
class World {
 public:
  /// Makes the value that stands for the global world.
  World() = default;
  /// @{
  /// Have this value stand for the same world; so do moves, which leave the other as it was.
  World(const World&) = default;
  World& operator=(const World&) = default;
  /// @}
  /// Makes a world, with `default_config()`; see below.
  explicit World(const Rendezvous& rendezvous) : World(rendezvous, default_config()) {}
  /// Makes a world. Collective over its members, who bring the same name, size and knobs; nobody
  /// else takes part. Members of one host share memory, those of several need UCX. Throws
  /// InvalidArgument for what this member sees by itself (a rank outside of the size, a function
  /// that is missing, a number that a member of this name has brought already); Mismatch where
  /// sizes or knobs differ; BackendError, which names who has not come, after
  /// `config.start_timeout`; RankFailed where a member dies meanwhile: on all members that have
  /// come.
  World(const Rendezvous& rendezvous, const Config& config);

  /// Returns the knobs of the environment, without what is the global world's own: timeline,
  /// process sets, cores of threads, HVD_WIRE=mpi.
  static Config default_config();

  /// Returns this process's number in the world, from 0.
  [[nodiscard]] int rank() const;
  /// Returns the number of ranks in the world.
  [[nodiscard]] int size() const;
  /// Returns this process's number among the world's ranks of this host, from 0.
  [[nodiscard]] int local_rank() const;
  /// Returns the number of the world's ranks on this host.
  [[nodiscard]] int local_size() const;
  /// Returns the number of this host in the world, from 0.
  [[nodiscard]] int cross_rank() const;
  /// Returns the number of hosts in the world.
  [[nodiscard]] int cross_size() const;
  /// Returns the name that its rendezvous gave it; empty for the global world. Throws nothing.
  [[nodiscard]] std::string name() const;
  /// Returns whether it runs: it was not left, and it has not failed. Throws nothing.
  [[nodiscard]] bool is_running() const;
  /// Returns the line that `backend_description()` gives for the global world.
  [[nodiscard]] std::string description() const;
  /// Returns counters of this rank since the world was made.
  [[nodiscard]] Stats stats() const;

  /// Leaves the world. Not collective; returns in about 0.3 s. Where the others leave meanwhile,
  /// all have ended in order. What others have pending, or begin later, and needs this rank fails
  /// there with a RankFailed that names it; all else goes on. Where this rank has something pending
  /// itself, or its process ends before the others leave, the world fails with that. Does nothing
  /// where it was left before. The global world is ended by `shutdown()`: throws InvalidArgument
  /// for it.
  void leave();
  /// Blocks until all ranks have called it or left, and has the world end in order then.
  /// Collective. Returns whether it has.
  bool shutdown();

  /// Ends the world at once, on all its ranks, as `hvd::abort` ends the global one.
  void abort(const std::string& reason) const;

  /// Returns the world that calls of this thread without a world mean: that of the innermost
  /// WorldScope, else the global one.
  static World current();
  /// Calls `work` in a WorldScope of this world, and returns what it returns.
  template <class Work>
  auto run(Work&& work) const;

  /// Makes a process set of this world, as `hvd::add_process_set` does.
  ProcessSet add_process_set(const std::vector<int>& ranks) const;
  /// Removes a process set of this world, as `hvd::remove_process_set` does.
  void remove_process_set(const ProcessSet& process_set) const;
  /// @{
  /// Blocks until all ranks of the world, or of a set of it, have called it.
  void barrier() const;
  void barrier(const ProcessSet& process_set) const;
  /// @}
  /// Does what `hvd::barrier_until` does: waits for all ranks of the world, for `time` at most, and
  /// returns those that have not come.
  [[nodiscard]] std::vector<int> barrier_until(std::chrono::nanoseconds time) const;
  /// Does the same, until that point in time at most.
  template <class Clock, class Duration>
  [[nodiscard]] std::vector<int> barrier_until(
      const std::chrono::time_point<Clock, Duration>& time) const {
    return barrier_until(std::chrono::ceil<std::chrono::nanoseconds>(time - Clock::now()));
  }
  /// @{
  /// Does what `hvd::join` does, over all ranks of the world, or a set of it.
  int join() const;
  int join(const ProcessSet& process_set) const;
  /// @}
  /// @{
  /// Do the same without waiting; they return a `Handle`, as the functions of hvd/hvd.h do.
  template <class Set = ProcessSet>
  [[nodiscard]] auto barrier_async(const Set& process_set = {}) const {
    return run([&] { return detail::Call_barrier_async()(process_set); });
  }
  template <class Set = ProcessSet>
  [[nodiscard]] auto join_async(const Set& process_set = {}) const {
    return run([&] { return detail::Call_join_async()(process_set); });
  }
  /// @}

  // The operations of hvd/hvd.h and <hvd/torch.h>, called for this world: `world.allreduce(tensor,
  // {.op = ReduceOp::Sum})`, `world.grouped_allreduce({a, b})`.
/// @cond
#define HVD_OPERATION_OF_WORLD(operation, kind)                                                    \
  template <class Input>                                                                           \
  auto operation(Input&& input, const typename OptionsOf<std::decay_t<Input>>::kind& options = {}) \
      const {                                                                                      \
    return run([&] {                                                                               \
      return detail::Call_##operation()(std::forward<Input>(input), with_this(options));           \
    });                                                                                            \
  }                                                                                                \
  template <class Item>                                                                            \
  auto operation(std::initializer_list<Item> items,                                                \
                 const typename OptionsOf<std::vector<Item>>::kind& options = {}) const {          \
    return operation(std::vector<Item>(items), options);                                           \
  }                                                                                                \
  template <class First, class Second>                                                             \
  requires std::is_same_v<std::decay_t<First>, std::decay_t<Second>>                               \
  auto operation(First&& first, Second&& second,                                                   \
                 const typename OptionsOf<std::decay_t<First>>::kind& options = {}) const {        \
    return run([&] {                                                                               \
      return detail::Call_##operation()(std::forward<First>(first), std::forward<Second>(second),  \
                                        with_this(options));                                       \
    });                                                                                            \
  }
  HVD_OPERATIONS(HVD_OPERATION_OF_WORLD)
#undef HVD_OPERATION_OF_WORLD
  /// @endcond

  /// @{
  /// Do what the functions of <hvd/torch.h> that are called so do, over the ranks of the world, or
  /// of a set of it.
  template <class Object, class Set = ProcessSet>
  Object broadcast_object(const Object& object, int root_rank, const Set& set = {}) const {
    return run([&] { return detail::Call_broadcast_object()(object, root_rank, set); });
  }
  template <class Object, class Set = ProcessSet>
  std::vector<Object> allgather_object(const Object& object, const Set& set = {}) const {
    return run([&] { return detail::Call_allgather_object()(object, set); });
  }
  /// @}

  /// Compares whether both stand for one world.
  bool operator==(const World& other) const { return life_ == other.life_; }

 private:
  friend class WorldScope;
  explicit World(std::shared_ptr<WorldLife> life) : life_(std::move(life)) {}
  template <class Options>
  [[nodiscard]] Options with_this(Options options) const {
    options.world = *this;
    return options;
  }
  std::shared_ptr<WorldLife> life_;  // null: the global world
};

/// A WorldScope has this thread's calls without a world mean `world`, for as long as it lives;
/// scopes end in the reverse order of their beginnings. One of the value that stands for the global
/// world changes nothing, as an option that is not given does not; `World::run` of that value, and
/// a scope with `kAlsoGlobal`, have them mean the global world, also inside of a scope of another.
class WorldScope {
 public:
  /// AlsoGlobal is the type of `kAlsoGlobal`.
  struct AlsoGlobal {};
  static constexpr AlsoGlobal kAlsoGlobal{};  ///< the global world counts as any other

  /// Begins the scope; of the value that stands for the global world, begins none.
  explicit WorldScope(const World& world) {
    if (world.life_) enter(world.life_);
  }
  /// Begins the scope, whatever world it is.
  WorldScope(const World& world, AlsoGlobal /*unused*/) { enter(world.life_); }
  ~WorldScope() {
    if (entered_) leave();
  }
  WorldScope(const WorldScope&) = delete;
  WorldScope& operator=(const WorldScope&) = delete;

 private:
  void enter(std::shared_ptr<WorldLife> life);
  void leave() noexcept;
  std::shared_ptr<WorldLife> life_;
  WorldLife* before_ = nullptr;
  bool entered_ = false;
};

template <class Work>
auto World::run(Work&& work) const {
  const WorldScope scope(*this, WorldScope::kAlsoGlobal);
  return std::forward<Work>(work)();
}

}  // namespace hvd
#pragma GCC visibility pop
