/// The chooser: every question has one answer, the answers are what the library has always done,
/// and what it does.

#include "hvd/routes.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/engine_probe.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using Memory = RouteQuestion::Memory;

constexpr OpKind kKinds[] = {OpKind::Allreduce, OpKind::Broadcast,     OpKind::Allgather,
                             OpKind::Alltoall,  OpKind::Reducescatter, OpKind::Barrier};

/// Sizes on both sides of each limit, also where it is shared among ranks or multiplied by them.
std::vector<std::size_t> sizes_around(std::size_t ranks, std::size_t hosts) {
  std::set<std::size_t> sizes{0, 1, 4, std::size_t{1} << 30};
  const std::size_t most = (ranks + hosts - 1) / hosts;
  const auto others = std::max<std::size_t>(hosts - 1, 1);
  for (const auto& row : kLimits)
    for (const std::size_t at : {row.value, row.value * ranks, row.value / ranks,
                                 row.value / others, row.value / (others * most)})
      for (const std::size_t bytes : {at - 4, at, at + 1, at + 4})
        sizes.insert(std::min(bytes, std::size_t{1} << 40));
  return {sizes.begin(), sizes.end()};
}

template <class Visit>
void visit_sizes(RouteQuestion question, const Visit& visit) {
  const auto sizes = sizes_around(question.ranks, question.hosts);
  for (const auto bytes : sizes)
    for (const bool repeats : {false, true}) {
      question.bytes = bytes;
      question.repeats = repeats;
      visit(question);
    }
}

/// All questions: kinds and operators, memory, machines, 1 to 64 ranks (with sanitizers not all;
/// one thread asks, so that ThreadSanitizer has nothing to find), 1 to 4 hosts.
template <class Visit>
void visit_questions(const Visit& visit) {
  struct Op {
    ReduceOp op;
    DataType dtype;
  };
  const std::array<Op, 3> ops{{{ReduceOp::Sum, DataType::Float32},
                               {ReduceOp::Average, DataType::Int32},
                               {ReduceOp::Adasum, DataType::Float32}}};
  const std::array<RouteMachine, 5> machines{{{true, false, true, Route::Nccl},
                                              {true, false, false, Route::SharedGpu},
                                              {true, true, true, Route::Staged},
                                              {true, true, false, std::nullopt},
                                              {false, false, true, std::nullopt}}};
  for (const auto kind : kKinds)
    for (const auto& [op, dtype] : ops)
      for (const auto memory : {Memory::Ordinary, Memory::Shared, Memory::Gpu})
        for (const auto& machine : machines)
          for (std::size_t ranks = 1; ranks <= (kThreadSanitizer ? 3 : 64);
               ranks += kSanitized && ranks >= 12 ? 13 : 1)
            for (std::size_t hosts = 1; hosts <= std::min<std::size_t>(ranks, 4); ++hosts) {
              if (kind != OpKind::Allreduce && op != ReduceOp::Sum) continue;
              visit_sizes({kind, op, dtype, 0, ranks, hosts, false, memory, machine}, visit);
            }
}

/// What the library did when the limits stood in twelve files, with the numbers that stood there;
/// leaders do all collectives since.
std::optional<RouteChoice> expected_on_host(const RouteQuestion& q) {
  constexpr std::size_t k = 1024, m = k * k;
  const bool is_adasum = q.kind == OpKind::Allreduce && q.op == ReduceOp::Adasum;
  const std::size_t block = q.kind == OpKind::Allgather ? q.bytes * q.ranks : q.bytes;
  const auto by = [](Route route, Access access = Access::None) {
    return RouteChoice{route, access};
  };
  if (q.kind == OpKind::Barrier && !q.repeats) return std::nullopt;
  if (q.kind == OpKind::Barrier || (q.repeats && !is_adasum && block <= 16 * k))
    return by(Route::AtSlot);
  if (q.kind == OpKind::Allreduce) return by(is_adasum ? Route::Adasum : Route::Claimed);
  if (q.repeats && q.ranks > 1 && q.ranks <= 11 && q.bytes <= 512 * k)
    return by(Route::EachItsPart, Access::Lent);
  if (q.bytes <= 64 * k) return by(Route::EachItsPart, Access::Copied);
  if (q.memory == Memory::Shared) return by(Route::EachItsPart, Access::Read);
  if (q.kind == OpKind::Broadcast && q.ranks > 2 && q.bytes <= 16 * m)
    return by(Route::EachItsPart, Access::Copied);
  if (q.machine.is_slow && q.bytes <= (q.kind == OpKind::Reducescatter ? m : 256 * k))
    return by(Route::EachItsPart, Access::Copied);
  if (!q.machine.reads_others) return by(Route::EachItsPart, Access::Copied);
  if (q.ranks == 1) return by(Route::EachItsPart, Access::Read);
  if (q.kind == OpKind::Broadcast && q.bytes >= 2 * m &&
      (q.machine.is_slow || (q.ranks == 2 && q.machine.has_core)))
    return by(Route::EachItsPart, Access::Ring);
  if (q.kind == OpKind::Allgather && q.machine.is_slow) return by(Route::EachItsPart, Access::Ring);
  if (q.kind == OpKind::Alltoall && q.machine.is_slow && q.bytes >= 64 * k * q.ranks)
    return by(Route::EachItsPart, Access::Ring);
  return by(Route::EachItsPart, Access::Read);
}

bool is_direct(const RouteQuestion& q, std::size_t sent) {
  if (!q.repeats || q.hosts > 8) return false;
  if (q.kind == OpKind::Barrier) return true;
  const std::size_t block = q.kind == OpKind::Allgather ? q.bytes * q.ranks : q.bytes;
  return block <= 64 * 1024 && sent <= (q.kind == OpKind::Alltoall ? 16 : 64) * 1024;
}

std::optional<Route> expected_between_hosts(const RouteQuestion& q) {
  const std::size_t most = (q.ranks + q.hosts - 1) / q.hosts, others = q.hosts - 1;
  const bool is_raw = most == 1 || (q.op == ReduceOp::Average && is_integer(q.dtype));
  const std::size_t sent = q.bytes * others * (is_raw ? most : 1);
  switch (q.kind) {
    case OpKind::Barrier: return is_direct(q, 0) ? std::optional(Route::Direct) : std::nullopt;
    case OpKind::Allgather:
      return is_direct(q, q.bytes * most * others) ? Route::Direct : Route::Streams;
    case OpKind::Alltoall:
      return is_direct(q, q.bytes * most * others) ? Route::Direct : Route::Streams;
    case OpKind::Reducescatter: return is_direct(q, sent) ? Route::Direct : Route::Slices;
    case OpKind::Broadcast: return is_direct(q, q.bytes * others) ? Route::Direct : Route::Streams;
    default:
      if (q.op == ReduceOp::Adasum) return Route::Adasum;
      return is_direct(q, sent) ? Route::Direct : Route::Slices;
  }
}

std::optional<RouteChoice> expected(const RouteQuestion& q) {
  if (q.memory == Memory::Gpu) return RouteChoice{q.machine.gpu.value_or(Route::Staged)};
  if (q.hosts == 1) return expected_on_host(q);
  const auto route = expected_between_hosts(q);
  return route ? std::optional(RouteChoice{*route}) : std::nullopt;
}

std::string told(const RouteQuestion& q) {
  return std::string(name_of(q.kind)) + " " + std::string(name_of(q.op)) + ", " +
         std::to_string(q.bytes) + " bytes, " + std::to_string(q.ranks) + " ranks, " +
         std::to_string(q.hosts) + " hosts, " + (q.repeats ? "repeated" : "once") + ", memory " +
         std::to_string(static_cast<int>(q.memory)) + (q.machine.is_slow ? ", slow" : "");
}

std::string told(const std::optional<RouteChoice>& way) { return way ? name_of(*way) : "none"; }

TEST_CASE("every question has one answer, as it always had, and every way is one") {
  std::set<RouteChoice> reached;
  std::size_t wrong = 0;
  visit_questions([&](const RouteQuestion& question) {
    const auto takers = std::ranges::count_if(
        all_routes(), [&](const RouteRow& row) { return row.takes(question); });
    const auto way = choose(question);
    if ((takers != (way ? 1 : 0) || way != expected(question)) && ++wrong < 10)
      FAIL_CHECK(told(question) << ": " << takers << " ways, " << told(way) << "; it was "
                                << told(expected(question)));
    if (way) reached.insert(*way);
  });
  CHECK(wrong == 0);
  CHECK(reached.size() == kRoutes - 1 + kAccesses - 1);
  for (const RouteChoice& way : reached)
    CHECK((way.route == Route::EachItsPart) == (way.access != Access::None));
}

TEST_CASE("a large message goes through a ring where its sender waits and each rank has a core") {
  constexpr std::size_t kLarge = limit(Limit::FedBytes);
  CHECK(routes::is_fed(kLarge, true, true));
  CHECK_FALSE(routes::is_fed(kLarge - 1, true, true));
  CHECK_FALSE(routes::is_fed(kLarge, false, true));
  CHECK_FALSE(routes::is_fed(kLarge, true, false));
}

TEST_CASE("every limit says why it is there and what was measured") {
  std::set<std::string_view> names;
  for (const auto& row : kLimits) {
    INFO(row.what);
    CHECK(row.value > 0);
    CHECK(std::min({row.what.size(), row.why.size(), row.measured.size()}) >=
          9);  // "no record" is honest too
  }
  CHECK(kRoutes <= 10);
  for (const auto& row : all_routes()) CHECK(names.insert(row.name).second);
}

/// One rank's tensors of an operation, of `elements` of input.
struct Tensors {
  std::vector<float> input, output;
  Submission submission;
  Tensors(OpKind kind, std::size_t elements, int ranks, const std::string& name)
      : input(elements, 1),
        output(elements * (kind == OpKind::Allgather ? static_cast<std::size_t>(ranks) : 1)) {
    const auto rows = static_cast<std::int64_t>(elements);
    submission.kind = kind;
    submission.name = name;
    submission.op = ReduceOp::Sum;
    const bool in_place = kind == OpKind::Allreduce || kind == OpKind::Broadcast;
    std::vector<std::int64_t> splits;
    if (kind == OpKind::Alltoall) splits.assign(static_cast<std::size_t>(ranks), rows / ranks);
    submission.tensors.push_back({in_place ? output.data() : input.data(),
                                  output.data(),
                                  DataType::Float32,
                                  {rows},
                                  nullptr,
                                  true,
                                  splits});
    submission.allocate = [this](std::size_t /*index*/, std::int64_t /*rows*/) {
      return static_cast<void*>(output.data());
    };
  }
  [[nodiscard]] SmallCall call(std::vector<std::int64_t>& received) const {
    const auto& tensor = submission.tensors.front();
    received.resize(tensor.splits.size());
    SmallCall call;
    call.kind = submission.kind;
    call.name = submission.name;
    call.shape = tensor.shape;
    call.input = tensor.input;
    call.output = tensor.output;
    call.splits = tensor.splits;
    call.received = received;
    call.op = ReduceOp::Sum;
    return call;
  }
};

/// Does the operation three times, the third and later ones as a caller that waits. Checks that it
/// took the ways that the chooser names.
void check_taken(Engine& engine, RouteQuestion question, int rank) {
  const std::string name = told(question) + "." + std::to_string(static_cast<int>(question.kind));
  const auto ranks = static_cast<int>(question.ranks);
  Tensors tensors(question.kind, question.bytes / 4, ranks, name);
  const auto run = [&](bool repeats) {
    question.repeats = repeats;
    const auto way = choose(question);
    const auto taken = [&] { return way ? EngineProbe::taken(engine, *way) : 0; };
    const auto before = taken();
    std::vector<std::int64_t> received;
    if (!repeats || !engine.small_calls().try_run(tensors.call(received)))
      engine.wait(*engine.submit(tensors.submission, After::Wait));
    INFO("rank " << rank << ", " << told(question) << ": " << told(way));
    CHECK(taken() == before + (way ? 1 : 0));
  };
  run(false);
  run(false);
  run(true);
  run(true);
}

void check_world(DirectCopies copies, int ranks) {
  WorldOptions options;
  options.size = ranks;
  options.config.direct_copies = copies;
  ThreadWorld world(options);
  world.run([&](int rank, Engine& engine) {
    RouteQuestion question;
    question.ranks = static_cast<std::size_t>(ranks);
    question.machine.reads_others = copies != DirectCopies::Off;
    question.machine.is_slow = copies == DirectCopies::Relayed;
    question.machine.has_core = static_cast<unsigned>(ranks) <= options.cores;
    for (const auto kind : kKinds)
      for (const std::size_t each : {1, 4, 40, 100, 200, 600, 3000}) {
        if (kind == OpKind::Barrier) continue;
        question.kind = kind;
        question.bytes = each * 1024 * question.ranks;
        check_taken(engine, question, rank);
      }
  });
}

TEST_CASE("what the chooser names is what is done") {
  for (const int ranks : {1, 2, 3})
    for (const auto copies : {DirectCopies::On, DirectCopies::Relayed, DirectCopies::Off})
      check_world(copies, ranks);
}

}  // namespace
}  // namespace hvd::test
