#include "tests/support/programs/program_runner.h"
#include "tests/support/engine_probe.h"

#include <algorithm>
#include <array>
#include <typeinfo>

#include "tests/support/oracle/oracle.h"
#include "tests/support/programs/expectations.h"
#include "tests/support/thread_world.h"

namespace hvd::test {

namespace {

constexpr std::byte kUnset{0xA5};
constexpr std::size_t kMargin = 32;
constexpr std::chrono::seconds kLimit{50};

/// Memory of one tensor, between margins that nobody may write to.
class Memory {
 public:
  Memory(std::size_t size, Place place, Arena& arena) : size_(size), arena_(arena) {
    if (place == Place::Arena) {
      base_ = block_ = arena.allocate(size + kMargin);
    } else {
      heap_.resize(size + 2 * kMargin);
      base_ = heap_.data() + size % 3;  // ordinary memory need not be aligned
    }
    std::fill_n(base_, size + kMargin, kUnset);
  }
  ~Memory() { arena_.free(block_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::byte* data() const { return base_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {base_, size_}; }
  [[nodiscard]] bool intact() const {
    return std::all_of(base_ + size_, base_ + size_ + kMargin,
                       [](std::byte byte) { return byte == kUnset; });
  }

 private:
  std::size_t size_;
  Arena& arena_;
  std::byte* base_ = nullptr;
  std::byte* block_ = nullptr;
  std::vector<std::byte> heap_;
};

/// A submission of this rank's, with its memory.
struct Started {
  std::shared_ptr<HandleState> pending;
  std::vector<Data> inputs;
  std::vector<std::unique_ptr<Memory>> in, out;  ///< `out` is null in place
};

/// What the ranks of a run share.
struct Common {
  const Program& program;
  ThreadWorld& world;
  std::vector<std::atomic<bool>> gates;  ///< by phase
  std::vector<std::atomic<std::size_t>> phases;
  std::mutex mutex;
  std::vector<std::string> failures;

  void fail(int rank, std::size_t phase, std::size_t op, const std::string& what) {
    const std::lock_guard lock(mutex);
    failures.push_back("phase " + std::to_string(phase) + " operation " + std::to_string(op) +
                       " rank " + std::to_string(rank) + ": " + what);
  }
};

bool is_row_output(OpKind kind) { return kind == OpKind::Allgather || kind == OpKind::Alltoall; }

Submission submission_of(const Call& call, int rank, Arena& arena, Started& started) {
  Submission submission;
  submission.kind = call.kind;
  submission.name = call.name;
  submission.process_set = call.set;
  submission.op = call.op;
  submission.prescale_factor = call.prescale;
  submission.postscale_factor = call.postscale;
  submission.root = call.root;
  std::vector<std::size_t> rows;
  for (std::size_t t = 0; t < call.tensors.size(); ++t) {
    const TensorDraw& draw = call.tensors[t];
    if (call.kind == OpKind::Control) {
      submission.tensors.push_back({nullptr, nullptr, draw.dtype, draw.shape});
      continue;
    }
    const Data& data = started.inputs.emplace_back(input_of(call, rank, t));
    auto& in = started.in.emplace_back(std::make_unique<Memory>(data.size(), draw.place, arena));
    std::copy(data.begin(), data.end(), in->data());
    auto& out = started.out.emplace_back();
    const bool same_size = call.kind == OpKind::Allreduce || call.kind == OpKind::Broadcast;
    if (same_size && !draw.in_place)
      out = std::make_unique<Memory>(data.size(), t % 2 == 0 ? draw.place : Place::Heap, arena);
    // At the most as large as the input: room for any rank's part of it.
    if (call.kind == OpKind::Reducescatter && !draw.allocated)
      out = std::make_unique<Memory>(data.size(), Place::Heap, arena);
    void* output = out ? out->data() : same_size ? in->data() : nullptr;
    submission.tensors.push_back(
        {in->data(), output, draw.dtype, draw.shape, nullptr, draw.present, draw.splits});
    std::size_t row = element_bytes(draw.dtype);
    for (std::size_t d = 1; d < draw.shape.size(); ++d)
      row *= static_cast<std::size_t>(draw.shape[d]);
    rows.push_back(row);
  }
  submission.allocate = [&started, rows, &arena](std::size_t index, std::int64_t count) -> void* {
    started.out[index] =
        std::make_unique<Memory>(rows[index] * static_cast<std::size_t>(count), Place::Heap, arena);
    return started.out[index]->data();
  };
  return submission;
}

/// Returns the same for the fast path. `received`: of an alltoall.
SmallCall small_call(Submission& submission, std::vector<std::int64_t>& received) {
  SmallCall call = call_of(submission);
  received.resize(call.splits.size());
  call.received = received;
  if (call.output != nullptr || submission.tensors.empty()) return call;
  call.context = &submission;
  call.allocate = [](void* context, std::int64_t rows) {
    return static_cast<Submission*>(context)->allocate(0, rows);
  };
  return call;
}

/// One rank, in one phase.
class RankRun {
 public:
  RankRun(Common& common, int rank, std::size_t phase_index)
      : common_(common),
        rank_(rank),
        index_(phase_index),
        phase_(common.program.phases[phase_index]),
        engine_(common.world.engine(rank)),
        started_(phase_.ops.size()) {}

  void run() {
    const auto& threads = phase_.steps[static_cast<std::size_t>(rank_)];
    std::vector<std::thread> others;
    for (std::size_t t = 1; t + 1 < threads.size(); ++t)
      others.emplace_back([this, &steps = threads[t]] { follow(steps); });
    follow(threads.front());
    for (auto& thread : others) thread.join();
    follow(threads.back());
  }

 private:
  void follow(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      try {
        take(step);
      } catch (const std::exception& error) {
        common_.fail(rank_, index_, step.op,
                     std::string("unexpected ") + typeid(error).name() + ": " + error.what());
      }
    }
  }

  void take(const Step& step) {
    switch (step.kind) {
      case Step::Kind::Submit: return submit(step.op, After::Return);
      case Step::Kind::SubmitAndWait:
        if (run_fast(step.op)) return;
        submit(step.op, After::Wait);
        return wait(step.op);
      case Step::Kind::Wait: return wait(step.op);
      case Step::Kind::Poll:
        if (const auto& pending = started_[step.op].pending)
          while (!engine_.poll(*pending)) std::this_thread::yield();
        return wait(step.op);
      case Step::Kind::Refused: {
        Started started;
        Arena& arena = common_.world.arena(rank_);
        return refused(step,
                       [&] { engine_.submit(submission_of(step.refused, rank_, arena, started)); });
      }
      case Step::Kind::OpenGate: return common_.gates[index_].store(true);
      case Step::Kind::PassGate:
        while (!common_.gates[index_].load()) std::this_thread::yield();
    }
  }

  void submit(std::size_t op, After after) {
    Started& started = started_[op];
    started.pending =
        engine_.submit(submission_of(*call(op), rank_, common_.world.arena(rank_), started), after);
  }

  /// Runs it on the fast path; returns false, and nothing has happened, where it has none.
  bool run_fast(std::size_t op) {
    const Call& own = *call(op);
    if (own.kind > OpKind::Barrier || own.tensors.size() > 1 ||
        (own.tensors.size() == 1 && !own.tensors.front().present))
      return false;
    Started& started = started_[op];
    Submission submission = submission_of(own, rank_, common_.world.arena(rank_), started);
    std::vector<std::int64_t> received;
    const SmallCall small = small_call(submission, received);
    const auto fast = engine_.small_calls().start(small, After::Wait);
    if (!fast) {
      started = {};
      return false;
    }
    const Expected& expected = phase_.ops[op].expected[static_cast<std::size_t>(rank_)];
    if (expected.kind == Expected::Kind::Result) {
      engine_.small_calls().finish(*fast, small);
      started.pending = std::make_shared<HandleState>();
      started.pending->present_anywhere.assign(own.tensors.size(), true);
      if (own.kind == OpKind::Alltoall) started.pending->rows = {received};
      if (own.kind == OpKind::Allgather) started.pending->rows = expected.rows;
      check_result(op, own, started, expected);
    } else {
      Step step;
      step.op = op;
      step.refusal = expected;
      refused(step, [&] { engine_.small_calls().finish(*fast, small); });
    }
    started = {};
    return true;
  }

  void wait(std::size_t op) {
    Started& started = started_[op];
    if (!started.pending) return;
    const Expected& expected = phase_.ops[op].expected[static_cast<std::size_t>(rank_)];
    if (expected.kind == Expected::Kind::Result) {
      engine_.wait(*started.pending);
      check_result(op, *call(op), started, expected);
    } else {
      Step step;
      step.op = op;
      step.refusal = expected;
      refused(step, [&] { engine_.wait(*started.pending); });
    }
    started = {};
  }

  template <class Body>
  void refused(const Step& step, const Body& body) {
    const std::type_info* type = nullptr;
    std::string text;
    try {
      body();
    } catch (const Error& error) {
      type = &typeid(error);
      text = error.what();
    }
    static const std::type_info* const kTypes[] = {nullptr, &typeid(Mismatch),
                                                   &typeid(InvalidArgument), &typeid(DuplicateName),
                                                   &typeid(Joined)};
    const auto* const wanted = kTypes[static_cast<std::size_t>(step.refusal.kind)];
    if (type == nullptr || *type != *wanted)
      return common_.fail(rank_, index_, step.op,
                          std::string("expected ") + wanted->name() + ", got " +
                              (type ? type->name() : "a result") + ": " + text);
    for (const auto& fragment : step.refusal.fragments)
      if (text.find(fragment) == std::string::npos)
        common_.fail(rank_, index_, step.op, "no '" + fragment + "' in the message: " + text);
  }

  void check_result(std::size_t op, const Call& call, const Started& started,
                    const Expected& expected) {
    const auto check = [&](bool good, const std::string& what) {
      if (!good) common_.fail(rank_, index_, op, "'" + call.name + "': " + what);
    };
    const HandleState& pending = *started.pending;
    if (expected.value)
      check(pending.value == *expected.value,
            "value " + std::to_string(pending.value) + ", not " + std::to_string(*expected.value));
    if (call.kind >= OpKind::Barrier) return;
    check(pending.present_anywhere == expected.present, "who has which tensor");
    if (is_row_output(call.kind)) check(pending.rows == expected.rows, "rows from each rank");
    for (std::size_t t = 0; t < call.tensors.size(); ++t) {
      const std::string which = "tensor " + std::to_string(t) + " of kind " +
                                std::to_string(static_cast<int>(call.kind)) + ": ";
      const Memory* out = started.out[t].get();
      if (out != nullptr || is_row_output(call.kind))
        check(std::ranges::equal(started.in[t]->bytes(), started.inputs[t]),
              which + "the input has changed");
      check(started.in[t]->intact() && (out == nullptr || out->intact()),
            which + "written past its end");
      if (!expected.outputs[t]) continue;
      const oracle::Expected& wanted = *expected.outputs[t];
      const auto got = out != nullptr ? out->bytes() : started.in[t]->bytes();
      const std::string wrong =
          got.size() < wanted.bytes.size() ? "too short" : oracle::difference(wanted, got.data());
      check(wrong.empty(), which + "dtype " +
                               std::to_string(static_cast<int>(call.tensors[t].dtype)) + " op " +
                               std::to_string(static_cast<int>(call.op)) + ": " + wrong);
    }
  }

  [[nodiscard]] const std::optional<Call>& call(std::size_t op) const {
    return phase_.ops[op].calls[static_cast<std::size_t>(rank_)];
  }

  Common& common_;
  const int rank_;
  const std::size_t index_;
  const Phase& phase_;
  Engine& engine_;
  std::vector<Started> started_;
};

/// Everything has been waited for everywhere, so nothing may be staged any more. In one domain:
/// what was exchanged is given back when the next tensor is staged.
void look_for_leaks(Common& common, int rank, Engine& engine) {
  Submission barrier;
  barrier.kind = OpKind::Barrier;
  barrier.name = "all is done";
  engine.wait(*engine.submit(barrier, After::Wait));
  if (common.program.domains > 1) return;
  std::vector<float> values(1);
  engine.wait(*engine.submit(allreduce_of(values, "last", DataType::Float32), After::Wait));
  EngineProbe::drop_repeated(engine);
  const std::size_t used = common.world.arena(rank).used_bytes();
  if (used > 0)
    common.fail(rank, common.program.phases.size(), 0,
                std::to_string(used) + " bytes of shared memory are never given back");
}

}  // namespace

std::vector<std::string> run_program(const Program& program) {
  Config config;
  config.fusion_threshold_bytes = program.fusion_threshold;
  config.cache_capacity = program.cache_capacity;
  config.direct_copies =
      std::array{DirectCopies::On, DirectCopies::Relayed, DirectCopies::Off}[program.seed % 3];
  config.stall_check_time = std::chrono::seconds(10);  // who waits for whom, should it hang
  config.process_sets = program.static_sets;
  ThreadWorld world(
      {.size = program.size, .domains = program.domains, .config = config, .cores = program.cores});
  const auto size = static_cast<std::size_t>(program.size);
  Common common{program,
                world,
                std::vector<std::atomic<bool>>(program.phases.size()),
                std::vector<std::atomic<std::size_t>>(size),
                {},
                {}};
  const Watchdog watchdog(
      "a random program, HVD_TEST_SEED=" + std::to_string(program.seed) + " HVD_TEST_PROGRAMS=1",
      kLimit, [&] {
        std::string text = describe(program);
        for (std::size_t rank = 0; rank < size; ++rank)
          text += "\n  rank " + std::to_string(rank) + " in phase " +
                  std::to_string(common.phases[rank].load());
        const std::lock_guard lock(common.mutex);
        for (const auto& failure : common.failures) text += "\n  " + failure;
        return text;
      });
  world.run([&](int rank, Engine& engine) {
    for (std::size_t phase = 0; phase < program.phases.size(); ++phase) {
      common.phases[static_cast<std::size_t>(rank)] = phase;
      RankRun(common, rank, phase).run();
    }
    try {
      look_for_leaks(common, rank, engine);
    } catch (const std::exception& error) {
      common.fail(rank, program.phases.size(), 0,
                  std::string("unexpected at the end: ") + error.what());
    }
  });
  return common.failures;
}

}  // namespace hvd::test
