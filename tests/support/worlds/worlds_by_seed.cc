#include "tests/support/worlds/worlds_by_seed.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/hvd.h"
#include "tests/support/random.h"

namespace hvd::test::worlds_by_seed {

namespace {

using namespace std::chrono_literals;
using hvd::Rendezvous;  // other tests have theirs
using hvd::World;       // likewise

/// Wrong is thrown by a member that has seen something which must not be.
struct Wrong {
  std::string text;
};

void expect(bool condition, const std::string& what) {
  if (!condition) throw Wrong{what};
}

/// The numbers of a rank for one operation: others on each rank, small enough for exact sums.
float value_of(int rank, std::size_t at, std::uint64_t salt) {
  return static_cast<float>((rank + 1) * static_cast<int>(at % 13 + 1) +
                            static_cast<int>(salt % 1000));
}
std::vector<float> values_of(int rank, std::size_t count, std::uint64_t salt) {
  std::vector<float> values(count);
  for (std::size_t at = 0; at < count; ++at) values[at] = value_of(rank, at, salt);
  return values;
}
std::vector<float> sum_of(int size, std::size_t count, std::uint64_t salt) {
  std::vector<float> sum(count);
  for (int rank = 0; rank < size; ++rank)
    for (std::size_t at = 0; at < count; ++at) sum[at] += value_of(rank, at, salt);
  return sum;
}
Buffer buffer_of(std::vector<float>& values) {
  return {values.data(), DataType::Float32, {static_cast<std::int64_t>(values.size())}, {}};
}
template <class Result>
std::vector<float> floats_of(const Result& result) {
  const auto* const begin = reinterpret_cast<const float*>(result.data.data());
  return {begin, begin + result.data.size() / sizeof(float)};
}

/// One thread of a member. All its choices are the same on all members, but for the order in which
/// it waits.
class Worker {
 public:
  Worker(const World& world, const WorldPlan& plan, int thread)
      : world_(world),
        rank_(world.rank()),
        size_(world.size()),
        thread_(thread),
        random_(plan.seed + static_cast<std::uint64_t>(thread)) {}

  void step() {
    const std::uint64_t salt = random_.next();
    static const std::vector<std::size_t> kCounts{1, 33, 1000, 70'000};
    const std::size_t count = random_.pick(kCounts);
    switch (random_.below(9)) {
      case 0: return burst(count, salt);
      case 1: return broadcast(count, salt);
      case 2: return gather(salt);
      case 3: return exchange(salt);
      case 4: return scatter(salt);
      case 5: return ring(count, salt);
      case 6: return differ();
      default: return reduce(count, salt);
    }
  }

 private:
  [[nodiscard]] std::string name(const char* what) const {
    return formatted("{} of thread {}", what, thread_);
  }

  static void wait_for(const Handle<void>& handle, std::exception_ptr& error) {
    try {
      handle.wait();
    } catch (const Error&) {
      if (!error) error = std::current_exception();
    }
  }

  void reduce(std::size_t count, std::uint64_t salt) const {
    auto values = values_of(rank_, count, salt);
    world_.allreduce(buffer_of(values), buffer_of(values),
                     {.name = name("sum"), .op = ReduceOp::Sum});
    expect(values == sum_of(size_, count, salt), "an allreduce's sum");
  }

  void burst(std::size_t count, std::uint64_t salt) {
    const int many = random_.between(2, 12);
    std::vector<std::vector<float>> values;
    std::vector<Handle<void>> handles;
    for (int i = 0; i < many; ++i)
      values.push_back(values_of(rank_, count, salt + static_cast<std::uint64_t>(i)));
    std::exception_ptr error;  // the memory is in use until all that were submitted have ended
    try {
      for (int i = 0; i < many; ++i) {
        auto& own = values[static_cast<std::size_t>(i)];
        handles.push_back(world_.allreduce_async(
            buffer_of(own), buffer_of(own),
            {.name = name("burst") + std::to_string(i), .op = ReduceOp::Sum}));
      }
    } catch (const Error&) {
      error = std::current_exception();
    }
    Random(salt + static_cast<std::uint64_t>(rank_)).shuffle(handles);
    for (const auto& handle : handles) wait_for(handle, error);
    if (error) std::rethrow_exception(error);
    for (int i = 0; i < many; ++i)
      expect(values[static_cast<std::size_t>(i)] ==
                 sum_of(size_, count, salt + static_cast<std::uint64_t>(i)),
             "a sum of a burst");
  }

  void broadcast(std::size_t count, std::uint64_t salt) {
    const int root = random_.below(size_);
    auto values = values_of(rank_, count, salt);
    world_.broadcast(buffer_of(values), {.name = name("broadcast"), .root_rank = root});
    expect(values == values_of(root, count, salt), "a broadcast");
  }

  void gather(std::uint64_t salt) const {
    auto mine = values_of(rank_, static_cast<std::size_t>(rank_) * 10 + 1, salt);
    std::vector<float> all;
    for (int rank = 0; rank < size_; ++rank) {
      const auto of_rank = values_of(rank, static_cast<std::size_t>(rank) * 10 + 1, salt);
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    expect(floats_of(world_.allgather(buffer_of(mine), {.name = name("gather")})) == all,
           "an allgather");
  }

  void exchange(std::uint64_t salt) const {
    auto mine = values_of(rank_, static_cast<std::size_t>(size_), salt);
    std::vector<float> all;
    for (int rank = 0; rank < size_; ++rank)
      all.push_back(value_of(rank, static_cast<std::size_t>(rank_), salt));
    expect(floats_of(world_.alltoall(buffer_of(mine), {.name = name("exchange")})) == all,
           "an alltoall");
  }

  void scatter(std::uint64_t salt) const {
    const auto size = static_cast<std::size_t>(size_), begin = static_cast<std::size_t>(rank_) * 50;
    auto mine = values_of(rank_, size * 50, salt);
    const auto sum = sum_of(size_, size * 50, salt);
    const auto share = floats_of(
        world_.reducescatter(buffer_of(mine), {.name = name("scatter"), .op = ReduceOp::Sum}));
    expect(share == std::vector<float>(sum.begin() + static_cast<std::ptrdiff_t>(begin),
                                       sum.begin() + static_cast<std::ptrdiff_t>(begin + 50)),
           "a reducescatter");
  }

  void ring(std::size_t count, std::uint64_t salt) const {
    const int next = (rank_ + 1) % size_, before = (rank_ + size_ - 1) % size_;
    auto sent = values_of(rank_, count, salt);
    std::vector<float> received(count);
    const auto sending = world_.send_async(buffer_of(sent), {.peer = next, .tag = thread_});
    std::exception_ptr error;
    int from = before;
    try {
      from = world_.recv(buffer_of(received), {.peer = before, .tag = thread_});
    } catch (const Error&) {
      error = std::current_exception();
    }
    wait_for(sending, error);
    if (error) std::rethrow_exception(error);
    expect(from == before, "whom a message is from");
    expect(received == values_of(before, count, salt), "a message");
  }

  /// What the ranks give differs, which all hear of, and the world goes on.
  void differ() const {
    std::vector<float> values(static_cast<std::size_t>(rank_ == 0 ? 3 : 4), 1);
    try {
      world_.allreduce(buffer_of(values), buffer_of(values), {.name = name("differs")});
    } catch (const Mismatch&) {
      return;
    }
    expect(size_ == 1, "a Mismatch");
  }

  const World& world_;
  const int rank_, size_, thread_;
  Random random_;
};

/// The end of a member, as its first thread has brought it about or been told of it.
class Member {
 public:
  Member(const WorldPlan& plan, int place, World& world, const std::function<void()>& die)
      : plan_(plan), is_ender_(place == plan.ender), world_(world), die_(die) {}

  std::string work() {
    std::vector<std::thread> others;
    for (int thread = 1; thread < plan_.threads; ++thread)
      others.emplace_back([this, thread] { work_as(thread); });
    work_as(0);
    for (auto& other : others) other.join();
    return wrong_;
  }

 private:
  void work_as(int thread) {
    try {
      Worker worker(world_, plan_, thread);
      for (int step = 0; step < plan_.steps; ++step) worker.step();
      if (thread == 0) end();
      if (thread != 0 && !ends_well()) until_error(worker);
    } catch (const Wrong& wrong) {
      note(wrong.text);
    } catch (const Error& error) {
      judge(error.what());
    }
  }

  [[nodiscard]] bool ends_well() const {
    return plan_.end == EndOfWorld::Shutdown || plan_.end == EndOfWorld::Dropped;
  }

  static void until_error(Worker& worker) {
    for (;;) worker.step();
  }

  void end() {
    // what it does, it does on no other member's side: names of its own
    Worker more(world_, plan_, plan_.threads);
    switch (plan_.end) {
      case EndOfWorld::Shutdown:
      case EndOfWorld::Dropped:
      case EndOfWorld::Absent: return;
      case EndOfWorld::Left:
        if (is_ender_) world_.leave();
        break;
      case EndOfWorld::Aborted:
        if (is_ender_) world_.abort("reason of " + plan_.name);
        break;
      case EndOfWorld::Killed:
        if (is_ender_) die_();
        break;
      case EndOfWorld::Late:
        if (is_ender_) {
          while (world_.is_running()) std::this_thread::sleep_for(1ms);
        } else {
          std::vector<float> values(3, 1);
          world_.allreduce(buffer_of(values), buffer_of(values),
                           {.name = "never", .deadline = 50ms});
        }
        break;
    }
    until_error(more);
  }

  /// What a member is told of a world that has ended must say by whom.
  void judge(const std::string& said) {
    const std::string ender = formatted("rank {}", plan_.ender);
    switch (plan_.end) {
      case EndOfWorld::Shutdown: return note("an error in a world that ends well: " + said);
      case EndOfWorld::Dropped:
        // Whoever is late may hear of one that has gone, if that has waited in vain.
        if (said.find("has left") == std::string::npos &&
            said.find("has ended") == std::string::npos)
          note("not of one that has left: " + said);
        return;
      case EndOfWorld::Aborted:
        if (said.find("reason of " + plan_.name) == std::string::npos)
          note("not the reason: " + said);
        return;
      case EndOfWorld::Killed:
        if (said.find(ender) == std::string::npos) note("not who died: " + said);
        return;
      case EndOfWorld::Left:
      case EndOfWorld::Late:
      case EndOfWorld::Absent:
        if (said.find("rank") == std::string::npos && said.find(plan_.name) == std::string::npos)
          note("nobody named: " + said);
        return;
    }
  }

  void note(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (wrong_.empty()) wrong_ = formatted("{}: {}", plan_.name, text);
  }

  const WorldPlan& plan_;
  const bool is_ender_;
  World& world_;
  const std::function<void()>& die_;
  std::mutex mutex_;
  std::string wrong_;
};

}  // namespace

ProgramPlan plan_of(std::uint64_t seed, const ProgramShape& shape) {
  Random random(seed);
  ProgramPlan plan;
  if (shape.kills && random.one_in(2)) plan.victim = random.below(shape.ranks);
  static const std::vector<EndOfWorld> kEnds{
      EndOfWorld::Shutdown, EndOfWorld::Shutdown, EndOfWorld::Dropped, EndOfWorld::Left,
      EndOfWorld::Aborted,  EndOfWorld::Late,     EndOfWorld::Absent};
  for (int number = 0; number < shape.worlds; ++number) {
    WorldPlan world;
    world.name = formatted("world {} of seed {}", number, seed);
    while (world.members.size() < 2) {
      world.members.clear();
      for (int rank = 0; rank < shape.ranks; ++rank)
        if (random.one_in(2)) world.members.push_back(rank);
    }
    world.end = random.pick(kEnds);
    world.ender = random.below(static_cast<int>(world.members.size()));
    world.steps = random.between(1, shape.steps);
    world.threads = random.between(1, 2);
    world.seed = random.next();
    world.shares_memory = shape.shares_memory;
    const auto victim = std::ranges::find(world.members, plan.victim);
    if (victim != world.members.end()) {
      world.end = EndOfWorld::Killed;
      world.ender = static_cast<int>(victim - world.members.begin());
    }
    plan.worlds.push_back(std::move(world));
  }
  return plan;
}

namespace {

Config config_of(const WorldPlan& plan) {
  Config config;
  config.arena_bytes = std::uint64_t{16} << 20;
  config.cache_capacity = 256;
  config.log_level = LogLevel::Error;
  config.shared_memory = plan.shares_memory ? SharedMemory::Auto : SharedMemory::Off;
  config.start_timeout = plan.end == EndOfWorld::Absent ? 1s : 60s;
  return config;
}

/// Returns what was wrong, if there is no world now.
std::optional<std::string> make(std::optional<World>& world, const WorldPlan& plan,
                                const Rendezvous& rendezvous) {
  try {
    world.emplace(rendezvous, config_of(plan));
  } catch (const BackendError& error) {
    const std::string said = error.what();
    if (plan.end != EndOfWorld::Absent) return plan.name + ": cannot be made: " + said;
    return said.find("rank") == std::string::npos ? plan.name + ": not who is absent: " + said : "";
  }
  if (plan.end == EndOfWorld::Absent) return plan.name + ": made without all of its members";
  return std::nullopt;
}

}  // namespace

std::string take_part(const WorldPlan& plan, int place, const Rendezvous& rendezvous,
                      const RankHooks& hooks) {
  if (plan.end == EndOfWorld::Absent && place == plan.ender) {
    hooks.made();
    return "";
  }
  std::optional<World> world;
  const auto wrong = make(world, plan, rendezvous);
  hooks.made();
  if (wrong) return *wrong;
  std::string seen = Member(plan, place, *world, hooks.die).work();
  if (seen.empty() && plan.end == EndOfWorld::Shutdown && !world->shutdown())
    seen = plan.name + ": no end in order";
  return seen;
}

}  // namespace hvd::test::worlds_by_seed
