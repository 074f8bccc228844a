// The endpoint of a world of threads: what hvd/api/hvd.cc does, for an engine that is not the
// process's own.

#include <algorithm>
#include <utility>

#include "hvd/hvd.h"
#include "tests/contract/endpoint.h"

namespace hvd::contract {

namespace {

Submission submission_of(const Call& call, const std::shared_ptr<Results>& results) {
  Submission submission;
  submission.kind = call.kind;
  submission.name = call.name;
  submission.process_set = call.set;
  submission.op = call.op;
  submission.prescale_factor = call.prescale;
  submission.postscale_factor = call.postscale;
  submission.root = call.root;
  submission.device = call.device;
  const bool own_output = call.kind == OpKind::Allreduce || call.kind == OpKind::Broadcast;
  for (const Tensor& tensor : call.tensors) {
    submission.tensors.push_back({tensor.input, own_output ? tensor.output : nullptr, tensor.dtype,
                                  tensor.shape, nullptr, true, call.splits});
    results->push_back({{}, tensor.shape, {}});
  }
  if (own_output) return submission;
  if (call.into) {
    // Of a reducescatter every rank knows by itself how many rows come.
    if (call.kind != OpKind::Reducescatter)
      submission.tensors.front().output_rows = call.tensors.front().output_rows;
    submission.allocate = [to = call.tensors.front().output](std::size_t, std::int64_t) {
      return to;
    };
    return submission;
  }
  submission.allocate = [results, call](std::size_t index, std::int64_t rows) {
    Made& made = results->at(index);
    made.shape.front() = rows;
    made.data.resize(static_cast<std::size_t>(element_count(made.shape)) *
                     element_bytes(call.tensors[index].dtype));
    return static_cast<void*>(made.data.data());
  };
  return submission;
}

class EngineEndpoint final : public Endpoint {
 public:
  EngineEndpoint(Engine& engine, std::function<std::shared_ptr<void>(std::size_t)> allocate)
      : engine_(engine), allocate_(std::move(allocate)) {}

  Wait start(const Call& call) override { return submitted(call, After::Return); }
  Results run(const Call& call) override { return submitted(call, After::Wait)(); }

  int add_set(const std::vector<int>& ranks) override {
    Shape ordered(ranks.begin(), ranks.end());
    std::sort(ordered.begin(), ordered.end());
    return control(kAddProcessSet, ordered, 0);
  }
  void remove_set(int set) override {
    const auto& ranks = engine_.negotiator().sets().info(set).ranks;
    control(kRemoveProcessSet, Shape(ranks.begin(), ranks.end()), set);
  }
  int join(int set) override { return start_join(engine_, set)(); }
  void barrier(int set) override {
    Submission submission;
    submission.kind = OpKind::Barrier;
    submission.process_set = set;
    engine_.wait(*engine_.submit(std::move(submission), After::Wait));
  }
  void send(const Letter& letter) override { engine_.peer_calls().send(call_of(letter)); }
  int recv(const Letter& letter) override { return engine_.peer_calls().receive(call_of(letter)); }
  std::function<void()> start_send(const Letter& letter) override {
    return [this, pending = engine_.peer_calls().start_send(call_of(letter))] {
      engine_.wait(*pending);
    };
  }
  std::function<int()> start_recv(const Letter& letter) override {
    return [this, pending = engine_.peer_calls().start_receive(call_of(letter))] {
      engine_.wait(*pending);
      return static_cast<int>(pending->value);
    };
  }
  std::shared_ptr<void> allocate_shared(std::size_t bytes) override {
    return allocate_ ? allocate_(bytes) : nullptr;
  }
  void shutdown() override { engine_.shutdown(); }
  Engine& engine() override { return engine_; }

 private:
  static PeerCall call_of(const Letter& letter) {
    return {letter.memory,
            letter.memory,
            letter.dtype,
            element_count(letter.shape),
            letter.peer,
            letter.tag,
            {}};
  }
  Wait submitted(Call call, After after) {
    if (call.kind == OpKind::Alltoall && call.splits.empty() &&
        !call.tensors.front().shape.empty()) {
      const auto ranks = engine_.negotiator().sets().info(call.set).ranks.size();
      call.splits =
          even_splits(call.tensors.front().shape.front(), static_cast<int>(ranks), call.name);
    }
    auto results = std::make_shared<Results>();
    auto pending = engine_.submit(submission_of(call, results), after);
    return [this, results, pending, kind = call.kind] {
      engine_.wait(*pending);
      if (kind == OpKind::Alltoall) results->front().received = pending->rows.front();
      return *results;
    };
  }
  int control(std::string_view name, const Shape& ranks, int root) {
    Submission submission;
    submission.kind = OpKind::Control;
    submission.name = name;
    submission.root = root;
    submission.tensors.push_back({nullptr, nullptr, DataType::Int64, ranks, nullptr, true});
    const auto pending = engine_.submit(std::move(submission), After::Wait);
    engine_.wait(*pending);
    return static_cast<int>(pending->value);
  }

  Engine& engine_;
  const std::function<std::shared_ptr<void>(std::size_t)> allocate_;
};

}  // namespace

bool Endpoint::supports(OpKind kind, DataType dtype, ReduceOp op, Device device) {
  const BatchTraits traits{{kind, op}, dtype, device, &engine().negotiator().sets().info(0)};
  const auto& backends = engine().backends();
  return std::any_of(backends.begin(), backends.end(),
                     [&](const auto& backend) { return backend->supports(traits); });
}

std::function<int()> start_join(Engine& engine, int set) {
  Submission submission;
  submission.kind = OpKind::Join;
  submission.name = kJoin;
  submission.process_set = set;
  auto pending = engine.submit(std::move(submission));
  return [&engine, pending] {
    engine.wait(*pending);
    return static_cast<int>(pending->value);
  };
}

std::unique_ptr<Endpoint> make_engine_door(
    Engine& engine, std::function<std::shared_ptr<void>(std::size_t)> allocate) {
  return std::make_unique<EngineEndpoint>(engine, std::move(allocate));
}

}  // namespace hvd::contract
