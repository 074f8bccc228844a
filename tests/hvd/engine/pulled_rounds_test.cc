/// Operations of medium size that come back: each rank takes its part out of the others' blocks.
/// That they give the right values, whichever way each rank goes, and however late one reads what
/// the others have left.

#include "hvd/engine/fast_path/pulled_rounds.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <thread>

#include "hvd/engine/engine.h"
#include "tests/support/engine_probe.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr OpKind kPulledKinds[] = {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter,
                                   OpKind::Broadcast};
constexpr std::int64_t kRow = 4;  // elements: 16 bytes
constexpr std::int64_t kRowBytes = kRow * 4;
constexpr std::int64_t kMedium = (48 << 10) / kRowBytes;  // rows

/// One operation of a rank, whose values follow from `round` and the rank. The last rank of the set
/// is a broadcast's root.
struct Exchange {
  OpKind kind;
  std::vector<int> ranks;
  std::size_t place;
  int round;
  std::string name;
  std::int64_t rows;
  int set = 0;
  bool is_plain = false;  // the result is asked for when it is there
  std::function<void()> before_pull = {};
  Shape shape = {};
  Ints input = {}, output = {};
  std::vector<std::int64_t> splits = {}, received = {};

  [[nodiscard]] std::int32_t value(std::size_t of, std::int64_t i) const {
    return static_cast<std::int32_t>(100'000 * ranks[of] + 977 * round + i % 8191);
  }
  [[nodiscard]] std::size_t size() const { return ranks.size(); }

  void fill() {
    shape = {rows, kRow};
    for (std::int64_t i = 0; i < kRow * rows; ++i) input.push_back(value(place, i));
    const auto ranks_here = static_cast<std::int64_t>(size());
    std::int64_t result = rows;
    if (kind == OpKind::Allgather) result *= ranks_here;
    if (kind == OpKind::Alltoall) {  // the first rank gets what cannot be dealt evenly
      splits.assign(size(), rows / ranks_here);
      splits.front() += rows % ranks_here;
      received.resize(size());
      result = splits[place] * ranks_here;
    }
    if (kind == OpKind::Reducescatter) result = scattered_rows(rows, size(), place);
    output.assign(static_cast<std::size_t>(kRow * result), -1);
    if (kind == OpKind::Broadcast) output = input;
  }

  [[nodiscard]] SmallCall call() {
    SmallCall call;
    call.kind = kind;
    call.process_set = set;
    call.name = name;
    call.dtype = DataType::Int32;
    call.shape = shape;
    call.input = kind == OpKind::Broadcast ? output.data() : input.data();
    call.output = output.data();
    call.splits = splits;
    call.received = received;
    call.op = ReduceOp::Sum;
    call.root = ranks.back();
    if (!is_plain || kind == OpKind::Broadcast) return call;
    call.output = nullptr;
    call.context = this;
    call.allocate = [](void* context, std::int64_t) -> void* {
      auto& self = *static_cast<Exchange*>(context);
      if (self.before_pull) self.before_pull();
      return self.output.data();
    };
    return call;
  }
  [[nodiscard]] Submission submission() {
    Submission submission;
    submission.kind = kind;
    submission.process_set = set;
    submission.name = name;
    submission.op = ReduceOp::Sum;
    submission.root = kind == OpKind::Broadcast ? ranks.back() : 0;
    const bool by_rows = kind == OpKind::Allgather || kind == OpKind::Alltoall;
    const auto* const from = kind == OpKind::Broadcast ? output.data() : input.data();
    submission.tensors.push_back(
        {from, by_rows ? nullptr : output.data(), DataType::Int32, shape, nullptr, true, splits});
    submission.allocate = [this](std::size_t /*index*/, std::int64_t /*rows*/) {
      return static_cast<void*>(output.data());
    };
    return submission;
  }
  /// Returns whether it has taken the fast path.
  bool run(Engine& engine) {
    if (engine.small_calls().try_run(call())) return true;
    engine.wait(*engine.submit(submission(), After::Wait));
    return false;
  }

  [[nodiscard]] bool is_right() const {
    const auto is = [&](std::size_t at, std::size_t of, std::int64_t begin, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i)
        if (output[at + static_cast<std::size_t>(i)] != value(of, begin + i)) return false;
      return true;
    };
    const std::int64_t count = kRow * rows;
    if (kind == OpKind::Broadcast) return is(0, size() - 1, 0, count);
    if (kind == OpKind::Reducescatter) {
      std::int64_t begin = 0;
      for (std::size_t of = 0; of < place; ++of) begin += kRow * scattered_rows(rows, size(), of);
      for (std::size_t i = 0; i < output.size(); ++i) {
        std::int32_t sum = 0;
        for (std::size_t of = 0; of < size(); ++of)
          sum += value(of, begin + static_cast<std::int64_t>(i));
        if (output[i] != sum) return false;
      }
      return true;
    }
    const bool all = kind == OpKind::Allgather;
    const std::int64_t part = all ? count : kRow * splits[place];
    const std::int64_t begin =
        all ? 0
            : kRow * std::accumulate(splits.begin(),
                                     splits.begin() + static_cast<std::ptrdiff_t>(place), 0L);
    for (std::size_t of = 0; of < size(); ++of)
      if (!is(of * static_cast<std::size_t>(part), of, begin, part)) return false;
    return true;
  }
};

std::vector<int> ranks_up_to(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::unique_ptr<Exchange> exchange(OpKind kind, std::vector<int> ranks, int rank, int round,
                                   std::string name, std::int64_t rows) {
  const auto place =
      static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  auto made = std::make_unique<Exchange>(
      Exchange{kind, std::move(ranks), place, round, std::move(name), rows});
  made->fill();
  return made;
}

/// Runs it so often that it comes back; returns whether the last has taken the fast path.
bool warm_up(Engine& engine, OpKind kind, const std::vector<int>& ranks, int rank,
             const std::string& name, std::int64_t rows, int set = 0) {
  bool fast = false;
  for (int round = 0; round < 5; ++round) {
    const auto one = exchange(kind, ranks, rank, round, name, rows);
    one->set = set;
    fast = one->run(engine);
    CHECK(one->is_right());
  }
  return fast;
}

void join(Engine& engine) {
  Submission join;
  join.kind = OpKind::Join;
  join.name = kJoin;
  engine.wait(*engine.submit(join, After::Wait));
}

/// Writes over all of the arena that is free.
void spoil_free_memory(Arena& arena) {
  std::vector<std::byte*> blocks;
  for (std::size_t bytes = 1 << 20; bytes >= 4096; bytes /= 2)
    for (int i = 0; i < 8; ++i)
      if (std::byte* const block = arena.try_allocate(bytes)) {
        std::memset(block, 0x5a, bytes);
        blocks.push_back(block);
      }
  for (std::byte* const block : blocks) arena.free(block);
}

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::yield();
}

}  // namespace

TEST_CASE(
    "pulled rounds: all kinds, sizes around the bounds, every rank with data of its own, round "
    "after round") {
  constexpr std::int64_t kFirst = limit(Limit::SlotBytes) / kRowBytes,
                         kLast = limit(Limit::LentBytes) / kRowBytes;
  for (const int size : {2, 3, 4})
    for (const OpKind kind : kPulledKinds)
      for (const std::int64_t rows : {kFirst, kFirst + 1, 3 * kFirst + 5, kLast, kLast + 1}) {
        if (kSanitized && rows >= kLast) continue;  // which takes long there
        CAPTURE(size);
        CAPTURE(static_cast<int>(kind));
        CAPTURE(rows);
        ThreadWorld world({.size = size});
        std::atomic<int> slow = 0, wrong = 0;
        constexpr int kRounds = 12;
        world.run([&](int rank, Engine& engine) {
          for (int round = 0; round < kRounds; ++round) {
            const auto one = exchange(kind, ranks_up_to(size), rank, round, "again", rows);
            one->is_plain = round % 3 == 2;
            const bool fast = one->run(engine);
            wrong += one->is_right() ? 0 : 1;
            // in the last round others may be in shutdown()
            slow += fast || round < 3 || round + 1 == kRounds ? 0 : 1;
          }
        });
        CHECK(wrong == 0);
        CHECK(slow == (rows <= kLast ? 0 : size * (kRounds - 4)));
      }
}

TEST_CASE(
    "pulled rounds: a slow reader finds what was left for it, whatever its owners do meanwhile") {
  for (const OpKind kind : {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter}) {
    CAPTURE(static_cast<int>(kind));
    Config config;
    config.process_sets = {{0, 1}};
    ThreadWorld world({.size = 3, .config = config});
    std::atomic<bool> is_held = false, may_pull = false;
    std::atomic<int> wrong = 0, done = 0;
    world.run([&](int rank, Engine& engine) {
      const auto all = ranks_up_to(3);
      CHECK(warm_up(engine, kind, all, rank, "a", kMedium));
      const auto held = exchange(kind, all, rank, 99, "a", kMedium);
      held->is_plain = rank == 2;
      held->before_pull = [&] {
        is_held = true;
        wait_for(may_pull);
      };
      CHECK(held->run(engine));
      wrong += held->is_right() ? 0 : 1;
      if (rank == 2) return;
      wait_for(is_held);
      // The others' rounds that follow: of that size, of others, with what they keep dropped in
      // between, and in memory that was given back.
      for (const std::int64_t rows : {kMedium, kMedium + 1, 2 * kMedium, kMedium})
        for (int turn = 0; turn < 2; ++turn) {
          for (int round = 0; round < 8; ++round) {
            const auto one = exchange(kPulledKinds[round % 4], {0, 1}, rank, 7 * round, "b", rows);
            one->set = 1;
            one->run(engine);
            wrong += one->is_right() ? 0 : 1;
          }
          static_cast<void>(EngineProbe::drop_repeated(engine));
          spoil_free_memory(world.arena(rank));
        }
      if (++done == 2) may_pull = true;
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE(
    "pulled rounds: a slow reader's round has ended when another thread of it joins, and when the "
    "world fails") {
  for (const bool fails : {false, true}) {
    CAPTURE(fails);
    std::atomic<Board*> board = nullptr;
    ThreadWorld world({.size = 3, .customize = [&](int rank, EngineParts& parts) {
                         if (rank == 0) board = parts.board.get();
                       }});
    std::atomic<bool> is_held = false, may_pull = false;
    std::atomic<int> wrong = 0, done = 0;
    const auto body = [&](int rank, Engine& engine) {
      const auto all = ranks_up_to(3);
      CHECK(warm_up(engine, OpKind::Allgather, all, rank, "a", kMedium));
      const auto held = exchange(OpKind::Allgather, all, rank, 99, "a", kMedium);
      held->is_plain = rank == 2;
      std::thread joiner;
      held->before_pull = [&] {
        if (!fails) joiner = std::thread([&] { join(engine); });
        is_held = true;
        wait_for(may_pull);
      };
      CHECK(held->run(engine));
      wrong += held->is_right() ? 0 : 1;
      if (rank != 2) {
        wait_for(is_held);
        if (fails && rank == 0)
          board.load()->set_failure({Status::Code::BackendError, "made to fail"});
        for (int round = 0; round < 20 && !fails; ++round) {
          // where the blocks were: others are now
          const auto one = exchange(OpKind::Allgather, all, rank, round, "a", kMedium);
          CHECK_THROWS_AS(one->run(engine), Joined);
        }
        if (++done == 2) may_pull = true;
        if (!fails) join(engine);
      }
      if (joiner.joinable()) joiner.join();
      if (fails) {
        const auto after = exchange(OpKind::Allgather, all, rank, 1, "a", kMedium);
        CHECK_THROWS_AS(after->run(engine), BackendError);
        return;
      }
      CHECK(warm_up(engine, OpKind::Allgather, all, rank, "a", kMedium));
    };
    world.run(body);
    CHECK(wrong == 0);
  }
}

TEST_CASE(
    "pulled rounds: whichever way each rank goes, several under way, two sets of the same ranks") {
  for (const int size : {2, 3, 4})
    for (const std::uint32_t capacity : {16U, 256U}) {
      CAPTURE(size);
      CAPTURE(capacity);
      Config config;
      config.cache_capacity = capacity;
      config.process_sets = {ranks_up_to(size), {0, 1}};
      ThreadWorld world({.size = size, .config = config, .cores = size < 4 ? 4U : 2U});
      std::atomic<int> wrong = 0, fast = 0;
      world.run([&](int rank, Engine& engine) {
        std::mt19937 common(11), own(static_cast<unsigned>(rank) + 100);
        std::deque<std::pair<std::unique_ptr<Exchange>, std::shared_ptr<HandleState>>> submitted;
        std::deque<std::pair<std::unique_ptr<Exchange>, std::shared_ptr<RepeatedOp>>> started;
        const auto check = [&](const Exchange& one) { wrong += one.is_right() ? 0 : 1; };
        const auto finish_all = [&] {
          for (; !submitted.empty(); submitted.pop_front()) {
            engine.wait(*submitted.front().second);
            check(*submitted.front().first);
          }
          for (; !started.empty(); started.pop_front()) {
            engine.small_calls().finish(*started.front().second, started.front().first->call());
            check(*started.front().first);
          }
        };
        for (int round = 0; round < (kSanitized ? 200 : 600); ++round) {
          const auto kind = kPulledKinds[common() % std::size(kPulledKinds)];
          const int set = static_cast<int>(common() % 3);
          const std::string name =
              common() % 4 == 0 ? "" : std::string(1, static_cast<char>('a' + common() % 2));
          const std::int64_t rows =
              common() % 8 == 0 ? kMedium * static_cast<std::int64_t>(1 + common() % 3) : kMedium;
          const bool is_among = set < 2 || rank < 2;
          if (common() % 3 == 0) finish_all();
          if (!is_among) continue;
          auto one = exchange(kind, set == 2 ? std::vector<int>{0, 1} : ranks_up_to(size), rank,
                              round, name, rows);
          one->set = set;
          one->is_plain = own() % 4 == 0;
          const auto same = [&](const auto& other) {
            return other.first->name == name && other.first->kind == kind &&
                   other.first->set == set;
          };
          if (std::any_of(submitted.begin(), submitted.end(), same) ||
              std::any_of(started.begin(), started.end(), same))
            finish_all();
          const unsigned way = own() % 6;
          if (way == 0) {
            auto pending = engine.submit(one->submission(), After::Return);
            submitted.emplace_back(std::move(one), std::move(pending));
          } else if (way == 1) {
            one->is_plain = false;
            if (auto op = engine.small_calls().start(one->call(), After::Repeat)) {
              ++fast;
              started.emplace_back(std::move(one), std::move(op));
            } else {
              auto pending = engine.submit(one->submission(), After::Repeat);
              submitted.emplace_back(std::move(one), std::move(pending));
            }
          } else {
            fast += one->run(engine) ? 1 : 0;
            check(*one);
          }
        }
        finish_all();
      });
      CHECK(wrong == 0);
      CHECK(fast > 0);
    }
}

TEST_CASE(
    "pulled rounds: ranks that disagree, that join, that remove the set and that call shutdown() "
    "are noticed as ever") {
  for (const OpKind kind : {OpKind::Reducescatter, OpKind::Broadcast}) {
    CAPTURE(static_cast<int>(kind));
    Config config;
    config.process_sets = {{0, 1, 2}};
    ThreadWorld world({.size = 3, .config = config});
    world.run([&](int rank, Engine& engine) {
      const std::vector<int> all{1, 2, 0};  // rank 0 is the root
      const auto set_order = kind == OpKind::Broadcast ? all : ranks_up_to(3);
      for (int times = 0; times < 4; ++times) {
        CHECK(warm_up(engine, kind, set_order, rank, "a", 5 * kMedium));
        const auto odd = exchange(kind, set_order, rank, 0, "a", 5 * kMedium + (rank == 1 ? 1 : 0));
        CHECK_THROWS_AS(odd->run(engine), Mismatch);
      }
      CHECK(warm_up(engine, kind, set_order, rank, "a", 5 * kMedium));
      Ints values(1);
      engine.wait(
          *engine.submit(allreduce_of(values, "all have read", DataType::Int32), After::Wait));
      CHECK(EngineProbe::drop_repeated(engine) == 1);
      CHECK(world.arena(rank).used_bytes() == 0);  // no block is lost with a round that failed
      CHECK(warm_up(engine, kind, set_order, rank, "a", 5 * kMedium));
      CHECK(warm_up(engine, kind, set_order, rank, "s", kMedium, 1));
      const auto orphan = exchange(kind, set_order, rank, 0, "s", kMedium);
      orphan->set = 1;
      std::shared_ptr<RepeatedOp> op;
      if (rank != 2) op = engine.small_calls().start(orphan->call(), After::Repeat);
      Submission removal;
      removal.kind = OpKind::Control;
      removal.name = std::string(kRemoveProcessSet);
      removal.root = 1;
      removal.tensors.push_back({nullptr, nullptr, DataType::Int64, {0, 1, 2}, nullptr, true});
      engine.wait(*engine.submit(removal, After::Wait));
      if (op) CHECK_THROWS_AS(engine.small_calls().finish(*op, orphan->call()), InvalidArgument);
      CHECK(warm_up(engine, kind, set_order, rank, "a", 5 * kMedium));
      if (rank != 2) {
        const auto late = exchange(kind, set_order, rank, 0, "a", 5 * kMedium);
        CHECK_THROWS_AS(late->run(engine), Joined);  // rank 2 has joined
      }
      join(engine);
      CHECK(warm_up(engine, kind, set_order, rank, "a", 5 * kMedium));
      if (rank == 0) return;  // and calls shutdown()
      const auto last = exchange(kind, set_order, rank, 0, "a", 5 * kMedium);
      CHECK_THROWS_AS(last->run(engine), Shutdown);
    });
  }
}

TEST_CASE(
    "pulled rounds: with more under way than there is memory for, the rest takes the long way") {
  constexpr int kMany = 80;  // of 512 KiB each
  ThreadWorld world({.size = 2});
  std::atomic<int> wrong = 0, fast = 0, slow = 0;
  world.run([&](int rank, Engine& engine) {
    const std::int64_t rows = limit(Limit::LentBytes) / kRowBytes;
    for (int times = 0; times < 5; ++times) {
      std::deque<std::pair<std::unique_ptr<Exchange>, std::shared_ptr<RepeatedOp>>> started;
      std::deque<std::shared_ptr<HandleState>> submitted;
      for (int i = 0; i < kMany; ++i) {
        auto one =
            exchange(OpKind::Broadcast, {0, 1}, rank, times + i, "n" + std::to_string(i), rows);
        auto op = engine.small_calls().start(one->call(), After::Repeat);
        if (rank == 1 && times == 4) ++(op ? fast : slow);
        submitted.push_back(op ? nullptr : engine.submit(one->submission(), After::Repeat));
        started.emplace_back(std::move(one), std::move(op));
      }
      for (std::size_t i = 0; i < started.size(); ++i) {
        auto& [one, op] = started[i];
        if (op) engine.small_calls().finish(*op, one->call());
        if (submitted[i]) engine.wait(*submitted[i]);
        wrong += one->is_right() ? 0 : 1;
      }
    }
  });
  CHECK(wrong == 0);
  CHECK(fast > 0);
  CHECK(fast + slow == kMany);
}

}  // namespace hvd::test
