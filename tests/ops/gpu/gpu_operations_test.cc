// Every operation of tensors on GPUs, the three ways: NCCL, a shared GPU, staged through the host.
// Whole engines as threads, over the host table: what arrives is what the same operation of host
// tensors gives, and what the ranks' numbers say.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <complex>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/negotiation/values/signature.h"
#include "tests/support/gpu/locked_gpu_api.h"
#include "tests/support/thread_world.h"

namespace hvd::gpu::test {
namespace {

using hvd::test::ThreadWorld;
using hvd::test::WorldOptions;
using Floats = std::vector<float>;

constexpr int kSize = 3;

/// `domains`: pretended hosts; of several, what is staged travels between them.
WorldOptions options_of(Route way, LockedDevices& devices, int domains = 1) {
  WorldOptions options;
  options.size = kSize;
  options.domains = domains;
  options.limit = std::chrono::seconds(120);
  options.add_backends = [way, &devices](int rank, EngineParts& parts,
                                         const std::shared_ptr<Arena>& arena) {
    devices.add_backends(way, rank, parts, arena);
  };
  return options;
}

/// Takes all room of an arena, and gives it back at the end.
class FullArena {
 public:
  explicit FullArena(Arena& arena) : arena_(arena) {
    for (std::size_t bytes = std::size_t{1} << 30; bytes >= 64; bytes /= 2)
      while (std::byte* const block = arena_.try_allocate(bytes)) taken_.push_back(block);
    used_ = arena_.used_bytes();
  }
  ~FullArena() {
    // nobody has found room in it, nor given back what is not theirs
    CHECK(arena_.used_bytes() == used_);
    for (std::byte* const block : taken_) arena_.free(block);
  }
  FullArena(const FullArena&) = delete;
  FullArena& operator=(const FullArena&) = delete;

 private:
  Arena& arena_;
  std::vector<std::byte*> taken_;
  std::size_t used_ = 0;
};

/// Runs `body` in a world of each way, its devices slow and quick; and staged while the arenas,
/// where staging takes its memory from, have no room.
void each_way(const std::function<void(int rank, Engine& engine)>& body) {
  struct Case {
    Route way;
    int domains;
    bool full_arenas = false;
  };
  for (const auto& [way, domains, full_arenas] :
       {Case{Route::Nccl, 1}, Case{Route::SharedGpu, 1}, Case{Route::Staged, 1},
        Case{Route::Staged, 2}, Case{Route::Staged, 1, true}, Case{Route::Staged, 2, true}}) {
    for (const int delay : {0, 3}) {
      CAPTURE(static_cast<int>(way));
      CAPTURE(domains);
      CAPTURE(full_arenas);
      CAPTURE(delay);
      LockedDevices devices(kSize);
      for (int rank = 0; rank < kSize; ++rank) devices.device(rank).delay = delay;
      ThreadWorld world(options_of(way, devices, domains));
      std::vector<std::unique_ptr<FullArena>> full;
      for (int rank = 0; full_arenas && rank < kSize; ++rank)
        full.push_back(std::make_unique<FullArena>(world.arena(rank)));
      world.run(body);
    }
  }
}

/// Different for each rank, tensor and element; sums of three are exact.
Floats values_of(int rank, int tensor, std::int64_t count) {
  Floats values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((rank + 1) * 100 + tensor * 10) + static_cast<float>(i) / 8;
  return values;
}

Submission of_kind(OpKind kind, std::string name, const Device& device) {
  Submission submission;
  submission.kind = kind;
  submission.name = std::move(name);
  submission.op = ReduceOp::Sum;
  submission.device = device;
  return submission;
}

std::shared_ptr<HandleState> run(Engine& engine, Submission submission) {
  auto pending = engine.submit(std::move(submission), After::Wait);
  engine.wait(*pending);
  return pending;
}

/// Once with the tensors on the GPU and once on the host, which is what the first is compared with,
/// too.
void on_gpu_and_host(
    int rank, const std::function<void(const Device& device, const std::string& name)>& body) {
  body({DeviceKind::Cuda, rank}, "on the GPU");
  body({}, "on the host");
}

/// Rows of `columns` that the operation leaves, one vector per tensor.
std::function<void*(std::size_t, std::int64_t)> into(std::vector<Floats>& outputs,
                                                     std::int64_t columns) {
  return [&outputs, columns](std::size_t index, std::int64_t rows) {
    outputs.at(index).assign(static_cast<std::size_t>(rows * columns), -7);
    return static_cast<void*>(outputs.at(index).data());
  };
}

}  // namespace

TEST_CASE(
    "gpu backends: broadcast of a group from every root, in place and elsewhere, tensors without "
    "elements among them") {
  each_way([](int rank, Engine& engine) {
    for (int root = 0; root < kSize; ++root) {
      for (const bool in_place : {true, false}) {
        on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
          const std::vector<std::int64_t> counts{40, 0, 7};
          std::vector<Floats> inputs, outputs;
          for (int t = 0; t < 3; ++t)
            inputs.push_back(values_of(rank, t, counts[static_cast<std::size_t>(t)]));
          const auto before = inputs;
          for (const auto count : counts)
            outputs.emplace_back(static_cast<std::size_t>(count), -7.0F);
          Submission submission = of_kind(OpKind::Broadcast, name, device);
          submission.root = root;
          for (std::size_t t = 0; t < 3; ++t)
            submission.tensors.push_back({inputs[t].data(),
                                          in_place ? inputs[t].data() : outputs[t].data(),
                                          DataType::Float32,
                                          {counts[t]},
                                          nullptr,
                                          true});
          run(engine, std::move(submission));
          for (std::size_t t = 0; t < 3; ++t)
            CHECK((in_place ? inputs : outputs)[t] ==
                  values_of(root, static_cast<int>(t), counts[t]));
          if (!in_place) CHECK(inputs == before);
        });
      }
    }
  });
}

TEST_CASE("gpu backends: allgather of different rows, one rank's none") {
  each_way([](int rank, Engine& engine) {
    on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
      const auto rows = [](int of, int tensor) -> std::int64_t { return tensor == 0 ? of * 2 : 3; };
      std::vector<Floats> inputs, outputs(2);
      Submission submission = of_kind(OpKind::Allgather, name, device);
      for (int t = 0; t < 2; ++t) inputs.push_back(values_of(rank, t, rows(rank, t) * 5));
      for (int t = 0; t < 2; ++t)
        submission.tensors.push_back({inputs[static_cast<std::size_t>(t)].data(),
                                      nullptr,
                                      DataType::Float32,
                                      {rows(rank, t), 5},
                                      nullptr,
                                      true});
      submission.allocate = into(outputs, 5);
      run(engine, std::move(submission));
      for (int t = 0; t < 2; ++t) {
        Floats expected;
        for (int from = 0; from < kSize; ++from) {
          const Floats part = values_of(from, t, rows(from, t) * 5);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        CHECK(outputs[static_cast<std::size_t>(t)] == expected);
      }
    });
  });
}

TEST_CASE("gpu backends: alltoall, uneven, with rows that are not sent") {
  each_way([](int rank, Engine& engine) {
    on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
      const auto rows = [](int from, int to) -> std::int64_t { return (from * 2 + to) % 3; };
      std::vector<std::int64_t> splits;
      std::int64_t all = 1;  // not sent
      for (int to = 0; to < kSize; ++to) all += splits.emplace_back(rows(rank, to));
      Floats input = values_of(rank, 0, all * 2);
      std::vector<Floats> outputs(1);
      Submission submission = of_kind(OpKind::Alltoall, name, device);
      submission.tensors.push_back(
          {input.data(), nullptr, DataType::Float32, {all, 2}, nullptr, true, splits});
      submission.allocate = into(outputs, 2);
      const auto pending = run(engine, std::move(submission));
      Floats expected;
      for (int from = 0; from < kSize; ++from) {
        CHECK(pending->rows.at(0).at(static_cast<std::size_t>(from)) == rows(from, rank));
        std::int64_t before = 0;
        for (int to = 0; to < rank; ++to) before += rows(from, to);
        const Floats theirs = values_of(from, 0, 100);
        expected.insert(expected.end(), theirs.begin() + before * 2,
                        theirs.begin() + (before + rows(from, rank)) * 2);
      }
      CHECK(outputs[0] == expected);
    });
  });
}

TEST_CASE("gpu backends: reducescatter, where some ranks keep nothing") {
  each_way([](int rank, Engine& engine) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
      on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
        const std::vector<std::int64_t> rows{7, 1, 0};
        std::vector<Floats> inputs, outputs(3);
        for (int t = 0; t < 3; ++t)
          inputs.push_back(values_of(rank, t, rows[static_cast<std::size_t>(t)] * 5));
        Submission submission = of_kind(OpKind::Reducescatter, name, device);
        submission.op = op;
        submission.prescale_factor = 2;
        for (std::size_t t = 0; t < 3; ++t)
          submission.tensors.push_back(
              {inputs[t].data(), nullptr, DataType::Float32, {rows[t], 5}, nullptr, true});
        submission.allocate = into(outputs, 5);
        run(engine, std::move(submission));
        for (std::size_t t = 0; t < 3; ++t) {
          Floats whole(static_cast<std::size_t>(rows[t] * 5));
          for (int r = 0; r < kSize; ++r) {
            const Floats theirs = values_of(r, static_cast<int>(t), rows[t] * 5);
            for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += 2 * theirs[i];
          }
          std::int64_t begin = 0;
          for (int r = 0; r < rank; ++r)
            begin += scattered_rows(rows[t], kSize, static_cast<std::size_t>(r)) * 5;
          const std::int64_t count =
              scattered_rows(rows[t], kSize, static_cast<std::size_t>(rank)) * 5;
          Floats expected(whole.begin() + begin, whole.begin() + begin + count);
          REQUIRE(outputs[t].size() == expected.size());
          for (std::size_t i = 0; i < expected.size(); ++i)
            CHECK(outputs[t][i] ==
                  doctest::Approx(op == ReduceOp::Average ? expected[i] / kSize : expected[i]));
        }
      });
    }
  });
}

TEST_CASE(
    "gpu backends: allreduce of groups with a tensor without elements, of truth values and of "
    "complex numbers") {
  each_way([](int rank, Engine& engine) {
    on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
      Floats first = values_of(rank, 0, 33), nothing, last = values_of(rank, 2, 5);
      Submission group = of_kind(OpKind::Allreduce, name, device);
      for (Floats* values : {&first, &nothing, &last})
        group.tensors.push_back({values->data(),
                                 values->data(),
                                 DataType::Float32,
                                 {static_cast<std::int64_t>(values->size())},
                                 nullptr,
                                 true});
      run(engine, std::move(group));
      for (std::size_t i = 0; i < first.size(); ++i)
        CHECK(first[i] == 600 + 3 * static_cast<float>(i) / 8);
      for (std::size_t i = 0; i < last.size(); ++i)
        CHECK(last[i] == 660 + 3 * static_cast<float>(i) / 8);

      std::array<bool, 4> truths{rank == 0, rank == 1, false, true};
      Submission any = of_kind(OpKind::Allreduce, name + ", any", device);
      any.op = ReduceOp::Max;
      any.tensors.push_back({truths.data(), truths.data(), DataType::Bool, {4}, nullptr, true});
      run(engine, std::move(any));
      CHECK(truths == std::array<bool, 4>{true, true, false, true});

      std::vector<std::complex<float>> numbers{{static_cast<float>(rank), 1},
                                               {2, static_cast<float>(-rank)}};
      Submission sum = of_kind(OpKind::Allreduce, name + ", complex", device);
      sum.tensors.push_back(
          {numbers.data(), numbers.data(), DataType::Complex64, {2}, nullptr, true});
      run(engine, std::move(sum));
      CHECK(numbers == std::vector<std::complex<float>>{{3, 3}, {6, -3}});
    });
  });
}

TEST_CASE("gpu backends: the zeros of a rank that has joined count") {
  each_way([](int rank, Engine& engine) {
    const auto join = [&] { run(engine, of_kind(OpKind::Join, std::string(kJoin), {})); };
    if (rank == 1) return join();
    on_gpu_and_host(rank, [&](const Device& device, const std::string& name) {
      for (const auto& [op, expected] :
           std::vector<std::pair<ReduceOp, float>>{{ReduceOp::Sum, 10},
                                                   {ReduceOp::Min, 0},
                                                   {ReduceOp::Max, 6},
                                                   {ReduceOp::Product, 0}}) {
        Floats values(9, static_cast<float>(4 + rank));
        Submission submission = of_kind(OpKind::Allreduce, name, device);
        submission.op = op;
        submission.tensors.push_back(
            {values.data(), values.data(), DataType::Float32, {9}, nullptr, true});
        run(engine, std::move(submission));
        CHECK(values == Floats(9, expected));
      }
    });
    join();
  });
}

TEST_CASE("gpu backends: who works on a stream gets staged results when they are there") {
  LockedDevices devices(kSize);
  for (int rank = 0; rank < kSize; ++rank) devices.device(rank).delay = 3;
  ThreadWorld world(options_of(Route::Staged, devices));
  world.run([](int rank, Engine& engine) {
    Floats values = values_of(rank, 0, 20);
    Submission submission = of_kind(OpKind::Allreduce, "on a stream", {DeviceKind::Cuda, rank});
    submission.on_stream = true;
    submission.tensors.push_back(
        {values.data(), values.data(), DataType::Float32, {20}, nullptr, true});
    const auto pending = run(engine, std::move(submission));
    CHECK(pending->done.load());
    CHECK(pending->completions.empty());  // there is nothing to wait for
    for (std::size_t i = 0; i < values.size(); ++i)
      CHECK(values[i] == 600 + 3 * static_cast<float>(i) / 8);
  });
}

TEST_CASE(
    "gpu backends: a tensor on another GPU than the rank's is refused there, and the others go on "
    "with it") {
  struct Case {
    Route way;
    int domains;
  };
  for (const auto& [way, domains] :
       {Case{Route::Nccl, 1}, Case{Route::SharedGpu, 1}, Case{Route::Staged, 1},
        Case{Route::Staged, 2}, Case{Route::Staged, 3}}) {
    CAPTURE(static_cast<int>(way));
    CAPTURE(domains);
    LockedDevices devices(kSize);
    WorldOptions options = options_of(way, devices, domains);
    options.customize = [](int rank, EngineParts& parts) { parts.device = rank; };
    ThreadWorld world(options);
    world.run([](int rank, Engine& engine) {
      for (const OpKind kind : {OpKind::Allreduce, OpKind::Broadcast, OpKind::Allgather}) {
        Floats values = values_of(rank, 0, 12);
        std::vector<Floats> outputs(1);
        const auto submission = [&](int device) {
          Submission made = of_kind(kind, "weights", {DeviceKind::Cuda, device});
          made.tensors.push_back({values.data(),
                                  kind == OpKind::Allgather ? nullptr : values.data(),
                                  DataType::Float32,
                                  {12},
                                  nullptr,
                                  true});
          made.allocate = into(outputs, 1);
          return made;
        };
        CHECK(engine.device() == rank);
        if (rank == 1) {
          std::string said;
          try {
            engine.submit(submission(0));
          } catch (const InvalidArgument& error) {
            said = error.what();
          }
          CAPTURE(said);
          CHECK(said.find("'weights': the tensor is on cuda:0, and the GPU of rank 1 is cuda:1") !=
                std::string::npos);
        }
        run(engine, submission(rank));  // the name is free, and nobody has heard of the other
        if (kind == OpKind::Allreduce) CHECK(values[0] == 600);
        if (kind == OpKind::Broadcast) CHECK(values == values_of(0, 0, 12));
        if (kind == OpKind::Allgather) CHECK(outputs[0].size() == 36);
      }
    });
  }
}

TEST_CASE("gpu backends: their names, and what they leave to others") {
  for (const auto& [way, names] : std::vector<std::pair<Route, std::vector<std::string>>>{
           {Route::Nccl, {"nccl", "staged"}},
           {Route::SharedGpu, {"cuda_ipc", "staged"}},
           {Route::Staged, {"staged"}}}) {
    LockedDevices devices(kSize);
    WorldOptions options = options_of(way, devices);
    int dressed = 0;
    options.customize = [&, names = names](int rank, EngineParts& parts) {
      const std::size_t host = parts.backends.size() - names.size();
      BatchTraits traits;
      traits.op = ReduceOp::Sum;
      traits.set = parts.process_sets.data();
      for (std::size_t i = 0; i < names.size(); ++i) {
        const Backend& backend = *parts.backends[host + i];
        CHECK(std::string(backend.name()) == names[i]);
        traits.kind = OpKind::Allreduce;
        traits.device = {};
        CHECK_FALSE(backend.supports(traits));
        traits.device = {DeviceKind::Cuda, rank};
        CHECK(backend.supports(traits));
        traits.kind = OpKind::Barrier;
        CHECK_FALSE(backend.supports(traits));
      }
      ++dressed;
    };
    const ThreadWorld world(options);
    CHECK(dressed == kSize);
  }
}

}  // namespace hvd::gpu::test
