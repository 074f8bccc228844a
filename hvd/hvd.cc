#include "hvd/hvd.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "hvd/engine.h"
#include "hvd/text.h"
#include "hvd/world.h"

namespace hvd {

namespace {

struct Global {
  std::mutex mutex;
  std::shared_ptr<World> world;
  std::vector<std::function<void()>> hooks;
};

/// Never destroyed: a process that ends without shutdown() ends as it is, and its death tells the others.
Global& global() {
  static auto* const instance = new Global;
  return *instance;
}

std::shared_ptr<World> current() {
  const std::lock_guard lock(global().mutex);
  if (!global().world) throw NotInitialized("hvd::init() has not been called, or hvd::shutdown() has");
  return global().world;
}

const Topology& topology() { return current()->engine->topology(); }

const ProcessSetInfo& info(int id) {
  const auto& negotiator = current()->engine->negotiator();
  if (!negotiator.has_process_set(id)) throw InvalidArgument(formatted("there is no process set {}", id));
  return negotiator.process_set(id);
}

Submission reduction(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs, const AllreduceOptions& options) {
  if (inputs.size() != outputs.size() || inputs.empty())
    throw InvalidArgument(formatted("grouped_allreduce: {} inputs and {} outputs", inputs.size(), outputs.size()));
  Submission submission;
  submission.kind = OpKind::Allreduce;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.op = options.op;
  submission.prescale_factor = options.prescale_factor;
  submission.postscale_factor = options.postscale_factor;
  submission.device = inputs.front().device;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].dtype != outputs[i].dtype || inputs[i].shape != outputs[i].shape)
      throw InvalidArgument(formatted("allreduce '{}': input is {} {}, output {} {}", options.name, name_of(inputs[i].dtype),
                                      to_string(inputs[i].shape), name_of(outputs[i].dtype), to_string(outputs[i].shape)));
    if (inputs[i].device != submission.device)
      throw InvalidArgument(formatted("allreduce '{}': the tensors of a group must be on one device", options.name));
    submission.tensors.push_back({inputs[i].data, outputs[i].data, inputs[i].dtype, inputs[i].shape, nullptr, true});
    submission.tensors.back().padded = outputs[i].padded;
  }
  return submission;
}

Submission broadcasting(const Buffer& buffer, const BroadcastOptions& options) {
  Submission submission;
  submission.kind = OpKind::Broadcast;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.root = options.root_rank;
  submission.device = buffer.device;
  submission.tensors.push_back({buffer.data, buffer.data, buffer.dtype, buffer.shape, nullptr, true});
  return submission;
}

/// What `Engine::run_immediately` is asked for. The call must not outlive the arguments.
Immediate immediate(OpKind kind, const Buffer& input, const Buffer& output, const std::string& name, const ProcessSet& set) {
  Immediate call;
  call.kind = kind;
  call.process_set = set.id();
  call.name = name;
  call.dtype = input.dtype;
  call.shape = input.shape;
  call.input = input.data;
  call.output = output.data;
  return call;
}

template <class Options>
void set_reduction(Immediate& call, const Options& options) {
  call.op = options.op;
  call.prescale_factor = options.prescale_factor;
  call.postscale_factor = options.postscale_factor;
}

bool is_on_host(const Buffer& buffer) { return buffer.device == Device(); }

/// Rows of a tensor whose other dimensions are the input's.
struct Rows {
  Gathered result;
  std::size_t element;
  static void* allocate(void* context, std::int64_t rows) {
    auto& self = *static_cast<Rows*>(context);
    self.result.shape.front() = rows;
    self.result.data.resize(static_cast<std::size_t>(element_count(self.result.shape)) * self.element);
    return self.result.data.data();
  }
};

void submit_and_wait(Submission submission) {
  const auto running = engine();
  running->wait(*running->submit(std::move(submission), After::Wait));
}

Handle<void> submit_only(Submission submission) {
  auto running = engine();
  auto pending = running->submit(std::move(submission));
  return {std::move(running), std::move(pending), [] {}};
}

/// Buffers of which some travel in another type than the one in which the caller keeps them.
class Travelling {
 public:
  Travelling(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs, const AllreduceOptions& options)
      : world_(current()), inputs_(inputs), outputs_(outputs) {
    options.compression.refuse_memory("allreduce");
    if (inputs.size() != outputs.size()) throw InvalidArgument(formatted("{} inputs and {} outputs", inputs.size(), outputs.size()));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Buffer& input = inputs[i];
      const DataType wire = options.compression.wire_type(input.dtype);
      memory_.emplace_back();
      if (wire == input.dtype) continue;
      if (input.device != Device() || input.dtype != outputs[i].dtype || input.shape != outputs[i].shape)
        throw InvalidArgument(
            formatted("allreduce '{}': compression needs input and output of one type and shape, in host memory", options.name));
      const auto count = static_cast<std::size_t>(element_count(input.shape));
      const std::size_t bytes = count * element_bytes(wire);
      if (world_->allocate_shared) memory_.back() = world_->allocate_shared(bytes);
      if (!memory_.back()) memory_.back() = std::shared_ptr<void>(::operator new(bytes), [](void* block) { ::operator delete(block); });
      world_->convert(memory_.back().get(), wire, input.data, input.dtype, count);
      inputs_[i].data = outputs_[i].data = memory_.back().get();
      inputs_[i].dtype = outputs_[i].dtype = wire;
    }
    kept_ = outputs;
  }
  [[nodiscard]] Submission submission(const AllreduceOptions& options) const { return reduction(inputs_, outputs_, options); }
  /// Once the operation is done; any thread, any number of times.
  void take_out() {
    std::call_once(taken_, [this] {
      for (std::size_t i = 0; i < memory_.size(); ++i)
        if (memory_[i])
          world_->convert(kept_[i].data, kept_[i].dtype, outputs_[i].data, outputs_[i].dtype,
                          static_cast<std::size_t>(element_count(kept_[i].shape)));
      memory_.clear();
    });
  }

 private:
  std::shared_ptr<World> world_;
  std::vector<Buffer> inputs_, outputs_;  // as they travel
  std::vector<Buffer> kept_;              // as the caller has them
  std::vector<std::shared_ptr<void>> memory_;
  std::once_flag taken_;
};

void submit_and_wait(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs, const AllreduceOptions& options) {
  if (options.compression == Compression::none()) return submit_and_wait(reduction(inputs, outputs, options));
  Travelling travelling(inputs, outputs, options);
  submit_and_wait(travelling.submission(options));
  travelling.take_out();
}

Handle<void> submit_only(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs, const AllreduceOptions& options) {
  if (options.compression == Compression::none()) return submit_only(reduction(inputs, outputs, options));
  const auto travelling = std::make_shared<Travelling>(inputs, outputs, options);
  Submission submission = travelling->submission(options);
  submission.keep_alive = travelling;
  auto running = engine();
  auto pending = running->submit(std::move(submission));
  return {std::move(running), std::move(pending), [travelling] { travelling->take_out(); }};
}

/// Of one device, the first one's.
Device device_of(const std::vector<Buffer>& inputs, std::string_view what, const std::string& name) {
  if (inputs.empty()) throw InvalidArgument(formatted("{} '{}': an empty group of tensors", what, name));
  for (const auto& input : inputs)
    if (input.device != inputs.front().device)
      throw InvalidArgument(formatted("{} '{}': the tensors of a group must be on one device", what, name));
  return inputs.front().device;
}

/// A submission whose outputs are made when their sizes are known.
struct Gathering {
  Submission submission;
  std::shared_ptr<std::vector<Gathered>> results;
};

Gathering gathering(OpKind kind, const std::vector<Buffer>& inputs, const std::string& name, const ProcessSet& set) {
  Gathering made;
  made.results = std::make_shared<std::vector<Gathered>>();
  Submission& submission = made.submission;
  submission.kind = kind;
  submission.name = name;
  submission.process_set = set.id();
  submission.device = device_of(inputs, name_of(kind), name);
  std::vector<std::size_t> elements;
  for (const auto& input : inputs) {
    made.results->push_back({{}, input.shape});
    elements.push_back(element_bytes(input.dtype));
    submission.tensors.push_back({input.data, nullptr, input.dtype, input.shape, nullptr, true});
  }
  submission.allocate = [results = made.results, elements](std::size_t index, std::int64_t rows) {
    Gathered& result = (*results)[index];
    result.shape.front() = rows;
    result.data.resize(static_cast<std::size_t>(element_count(result.shape)) * elements[index]);
    return static_cast<void*>(result.data.data());
  };
  return made;
}

Gathering gathering(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return gathering(OpKind::Allgather, inputs, options.name, options.process_set);
}

Gathering scattering(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  Gathering made = gathering(OpKind::Reducescatter, inputs, options.name, options.process_set);
  made.submission.op = options.op;
  made.submission.prescale_factor = options.prescale_factor;
  made.submission.postscale_factor = options.postscale_factor;
  return made;
}

Gathering exchanging(const Buffer& input, const AlltoallBufferOptions& options) {
  Gathering made = gathering(OpKind::Alltoall, {input}, options.name, options.process_set);
  auto& splits = made.submission.tensors.front().splits;
  splits = options.splits;
  if (splits.empty() && !input.shape.empty()) splits = even_splits(input.shape.front(), options.process_set.size(), options.name);
  return made;
}

Exchanged exchanged(const Gathering& made, const Pending& pending) {
  Gathered& result = made.results->front();
  return {result.data, result.shape, pending.rows.front()};
}

Handle<std::vector<Gathered>> submit_only(Gathering made) {
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {std::move(running), std::move(pending), [results = made.results] { return *results; }};
}

std::vector<Gathered> submit_and_wait(Gathering made) {
  submit_and_wait(std::move(made.submission));
  return std::move(*made.results);
}

Handle<Gathered> first(const Handle<std::vector<Gathered>>& handle) {
  return handle.map<Gathered>([](std::vector<Gathered> results) { return std::move(results.front()); });
}

std::int64_t control(std::string_view name, Shape ranks, int root) {
  Submission submission;
  submission.kind = OpKind::Control;
  submission.name = name;
  submission.root = root;
  submission.tensors.push_back({nullptr, nullptr, DataType::Int64, std::move(ranks), nullptr, true});
  const auto running = engine();
  const auto pending = running->submit(std::move(submission), After::Wait);
  running->wait(*pending);
  return pending->value;
}

}  // namespace

std::vector<std::int64_t> even_splits(std::int64_t rows, int ranks, std::string_view name) {
  if (rows % ranks != 0)
    throw InvalidArgument(formatted("alltoall '{}': {} rows cannot be divided evenly among {} ranks; give splits", name, rows, ranks));
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), rows / ranks);
}

void install_world(World world) {
  std::vector<std::function<void()>> hooks;
  {
    const std::lock_guard lock(global().mutex);
    if (global().world) throw InvalidArgument("hvd is running already");
    global().world = std::make_shared<World>(std::move(world));
    hooks = global().hooks;
  }
  for (const auto& hook : hooks) hook();
}

bool has_world() {
  const std::lock_guard lock(global().mutex);
  return global().world != nullptr;
}

void on_init(std::function<void()> hook) {
  const std::lock_guard lock(global().mutex);
  global().hooks.push_back(std::move(hook));
}

void shutdown() {
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(global().mutex);
    world = global().world;
  }
  if (!world) return;
  const bool clean = world->engine->shutdown();
  {
    const std::lock_guard lock(global().mutex);
    if (global().world == world) global().world.reset();
  }
  if (world->close) world->close(clean);
}

void leave_world(std::chrono::milliseconds patience) noexcept {
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(global().mutex);
    world = std::exchange(global().world, nullptr);
  }
  if (!world) return;
  try {
    const bool clean = world->engine->shutdown(patience);
    if (clean && world->close) world->close(true);
  } catch (...) {
    log(LogLevel::Error, "at the end of the process: {}", status_of_current_exception().text());
  }
}

bool is_initialized() { return has_world(); }

int rank() { return topology().rank; }
int size() { return topology().size; }
int local_rank() { return topology().local_rank; }
int local_size() { return topology().local_size; }
int cross_rank() { return topology().cross_rank; }
int cross_size() { return topology().cross_size; }
bool is_homogeneous() { return topology().homogeneous; }
bool mpi_threads_supported() { return current()->mpi_threads; }
std::string backend_description() { return current()->description; }
Stats stats() { return current()->engine->stats(); }

void start_timeline(const std::string& path, const TimelineOptions& options) {
  const auto running = engine();
  const auto exchange = [&running](const Bytes& mine) {
    Bytes copy = mine;
    const Buffer buffer{copy.data(), DataType::UInt8, {static_cast<std::int64_t>(copy.size())}, {}};
    Gathering made = gathering({buffer}, AllgatherOptions{.name = "hvd.start_timeline"});
    const auto pending = running->submit(std::move(made.submission), After::Wait);
    running->wait(*pending);
    std::vector<Bytes> all;
    auto from = made.results->front().data.begin();
    for (const auto rows : pending->rows.front()) {
      all.emplace_back(from, from + rows);
      from += rows;
    }
    return all;
  };
  running->timeline().start(path, options, running->config().timeline_max_bytes, running->topology(), exchange);
}

void stop_timeline() { engine()->timeline().stop(); }

std::shared_ptr<void> allocate_shared(std::size_t bytes) {
  const auto world = current();
  return world->allocate_shared ? world->allocate_shared(bytes) : nullptr;
}

std::shared_ptr<void> allocate_on_device(std::size_t bytes, Device device, DataType dtype, const AllreduceOptions& options) {
  Submission like;
  like.process_set = options.process_set.id();
  like.op = options.op;
  like.device = device;
  return engine()->allocate(like, dtype, bytes);
}

int ProcessSet::rank() const { return info(id_).rank; }
int ProcessSet::size() const { return static_cast<int>(info(id_).ranks.size()); }
bool ProcessSet::included() const { return info(id_).rank >= 0; }
std::vector<int> ProcessSet::ranks() const { return info(id_).ranks; }
ProcessSet global_process_set() { return {}; }
ProcessSet process_set(int id) {
  info(id);
  return ProcessSet(id);
}

std::shared_ptr<Engine> engine() { return current()->engine; }
void wait_for(Engine& engine, Pending& pending) { engine.wait(pending); }
bool poll_for(Engine& engine, const Pending& pending) { return engine.poll(pending); }

Handle<void> allreduce_async(const Buffer& input, const Buffer& output, const AllreduceOptions& options) {
  return submit_only({input}, {output}, options);
}
void allreduce(const Buffer& input, const Buffer& output, const AllreduceOptions& options) {
  if (is_on_host(input) && is_on_host(output) && input.dtype == output.dtype && input.shape == output.shape &&
      options.compression == Compression::none()) {
    Immediate call = immediate(OpKind::Allreduce, input, output, options.name, options.process_set);
    set_reduction(call, options);
    if (engine()->run_immediately(call)) return;
  }
  submit_and_wait({input}, {output}, options);
}
Handle<void> grouped_allreduce_async(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                                     const AllreduceOptions& options) {
  return submit_only(inputs, outputs, options);
}
void grouped_allreduce(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs, const AllreduceOptions& options) {
  submit_and_wait(inputs, outputs, options);
}
Handle<void> broadcast_async(const Buffer& buffer, const BroadcastOptions& options) { return submit_only(broadcasting(buffer, options)); }
void broadcast(const Buffer& buffer, const BroadcastOptions& options) {
  if (is_on_host(buffer)) {
    Immediate call = immediate(OpKind::Broadcast, buffer, buffer, options.name, options.process_set);
    call.root = options.root_rank;
    if (engine()->run_immediately(call)) return;
  }
  submit_and_wait(broadcasting(buffer, options));
}

Handle<Gathered> allgather_async(const Buffer& input, const AllgatherOptions& options) {
  return first(submit_only(gathering({input}, options)));
}
Gathered allgather(const Buffer& input, const AllgatherOptions& options) {
  if (is_on_host(input) && !input.shape.empty()) {
    Immediate call = immediate(OpKind::Allgather, input, {}, options.name, options.process_set);
    Rows rows{{{}, input.shape}, element_bytes(input.dtype)};
    call.allocate = &Rows::allocate;
    call.context = &rows;
    if (engine()->run_immediately(call)) return std::move(rows.result);
  }
  return std::move(submit_and_wait(gathering({input}, options)).front());
}
Handle<std::vector<Gathered>> grouped_allgather_async(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return submit_only(gathering(inputs, options));
}
std::vector<Gathered> grouped_allgather(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return submit_and_wait(gathering(inputs, options));
}

Handle<Gathered> reducescatter_async(const Buffer& input, const ReducescatterOptions& options) {
  return first(submit_only(scattering({input}, options)));
}
Gathered reducescatter(const Buffer& input, const ReducescatterOptions& options) {
  if (is_on_host(input) && !input.shape.empty()) {
    Immediate call = immediate(OpKind::Reducescatter, input, {}, options.name, options.process_set);
    set_reduction(call, options);
    Rows rows{{{}, input.shape}, element_bytes(input.dtype)};
    call.allocate = &Rows::allocate;
    call.context = &rows;
    if (engine()->run_immediately(call)) return std::move(rows.result);
  }
  return std::move(submit_and_wait(scattering({input}, options)).front());
}
Handle<std::vector<Gathered>> grouped_reducescatter_async(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  return submit_only(scattering(inputs, options));
}
std::vector<Gathered> grouped_reducescatter(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  return submit_and_wait(scattering(inputs, options));
}

Handle<Exchanged> alltoall_async(const Buffer& input, const AlltoallBufferOptions& options) {
  Gathering made = exchanging(input, options);
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {running, pending, [made, pending] { return exchanged(made, *pending); }};
}
Exchanged alltoall(const Buffer& input, const AlltoallBufferOptions& options) { return alltoall_async(input, options).wait(); }

ProcessSet add_process_set(const std::vector<int>& ranks) {
  Shape ordered(ranks.begin(), ranks.end());
  std::sort(ordered.begin(), ordered.end());
  const bool distinct = std::adjacent_find(ordered.begin(), ordered.end()) == ordered.end();
  if (ordered.empty() || !distinct || ordered.front() < 0 || ordered.back() >= size())
    throw InvalidArgument(
        formatted("add_process_set: {} must be distinct ranks from 0 to {}", to_string(Shape(ranks.begin(), ranks.end())), size() - 1));
  return ProcessSet(static_cast<int>(control(kAddProcessSet, std::move(ordered), 0)));
}

void remove_process_set(const ProcessSet& process_set) {
  if (process_set.id() == 0) throw InvalidArgument("remove_process_set: the global process set cannot be removed");
  const auto ranks = process_set.ranks();
  control(kRemoveProcessSet, Shape(ranks.begin(), ranks.end()), process_set.id());
}

int join(const ProcessSet& process_set) {
  Submission submission;
  submission.kind = OpKind::Join;
  submission.name = kJoin;
  submission.process_set = process_set.id();
  const auto running = engine();
  const auto pending = running->submit(std::move(submission), After::Wait);
  running->wait(*pending);
  return static_cast<int>(pending->value);
}

void barrier(const ProcessSet& process_set) {
  Immediate call;
  call.kind = OpKind::Barrier;
  call.process_set = process_set.id();
  if (engine()->run_immediately(call)) return;
  Submission submission;
  submission.kind = OpKind::Barrier;
  submission.process_set = process_set.id();
  submit_and_wait(std::move(submission));
}

}  // namespace hvd
