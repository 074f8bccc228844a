#include "hvd/api/buffers.h"

#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "hvd/base/text.h"

namespace hvd {

std::shared_ptr<HandleState> submit_and_wait(Submission submission) {
  const auto running = engine();
  auto pending = running->submit(std::move(submission), After::Wait);
  running->wait(*pending);
  return pending;
}

Handle<void> submit_only(Submission submission) {
  auto running = engine();
  auto pending = running->submit(std::move(submission));
  return {std::move(running), std::move(pending), [] {}};
}

Detour::Detour(const Buffer& input, const Buffer& output, DataType wire)
    : world_(current_world()),
      input_(input),
      output_(output),
      wire_(wire),
      count_(static_cast<std::size_t>(element_count(input.shape))) {
  const std::size_t bytes = count_ * element_bytes(wire);
  if (world_->allocate_shared && bytes > 0) memory_ = world_->allocate_shared(bytes);
  if (!memory_)
    memory_ =
        std::shared_ptr<void>(::operator new(bytes), [](void* block) { ::operator delete(block); });
}

void Detour::convert(void* to, DataType to_type, const void* from, DataType from_type) const {
  if (to_type != from_type) return world_->convert(to, to_type, from, from_type, count_);
  if (count_ > 0) std::memcpy(to, from, count_ * element_bytes(to_type));
}

namespace {

Submission reduction(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                     const AllreduceOptions& options) {
  require_running();
  if (inputs.size() != outputs.size() || inputs.empty())
    throw InvalidArgument(formatted("grouped_allreduce '{}': {} inputs and {} outputs",
                                    options.name, inputs.size(), outputs.size()));
  Submission submission = request(OpKind::Allreduce, options, inputs.front().device);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].dtype != outputs[i].dtype || inputs[i].shape != outputs[i].shape)
      throw InvalidArgument(formatted("allreduce '{}': input is {} {}, output {} {}", options.name,
                                      name_of(inputs[i].dtype), to_string(inputs[i].shape),
                                      name_of(outputs[i].dtype), to_string(outputs[i].shape)));
    if (inputs[i].device != submission.device)
      throw InvalidArgument(
          formatted("allreduce '{}': the tensors of a group must be on one device", options.name));
    submission.tensors.push_back(
        {inputs[i].data, outputs[i].data, inputs[i].dtype, inputs[i].shape, nullptr, true});
    submission.tensors.back().padded = outputs[i].padded;
  }
  return submission;
}

Submission broadcasting(const Buffer& buffer, const BroadcastOptions& options) {
  Submission submission = request(OpKind::Broadcast, options, buffer.device);
  submission.tensors.push_back(
      {buffer.data, buffer.data, buffer.dtype, buffer.shape, nullptr, true});
  return submission;
}

/// Buffers of which some travel in another type than the caller's.
class Travelling {
 public:
  Travelling(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
             const AllreduceOptions& options)
      : inputs_(inputs), outputs_(outputs) {
    // what travels does not lie where the caller's buffers do
    engine()->check(reduction(inputs, outputs, options));
    options.compression.refuse_memory("allreduce");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Buffer& input = inputs[i];
      const DataType wire = options.compression.wire_type(input.dtype);
      if (wire == input.dtype) continue;
      if (input.device != Device())
        throw InvalidArgument(formatted(
            "allreduce '{}': compression needs input and output in host memory", options.name));
      const Detour& detour = detours_.emplace_back(input, outputs[i], wire);
      detour.enter();
      inputs_[i].data = outputs_[i].data = detour.memory();
      inputs_[i].dtype = outputs_[i].dtype = wire;
    }
  }
  [[nodiscard]] Submission submission(const AllreduceOptions& options) const {
    return reduction(inputs_, outputs_, options);
  }
  /// Once the operation is done; any thread, any number of times.
  void take_out() {
    std::call_once(taken_, [this] {
      for (const Detour& detour : detours_) detour.leave();
      detours_.clear();
    });
  }

 private:
  std::vector<Buffer> inputs_, outputs_;  // as they travel
  std::vector<Detour> detours_;
  std::once_flag taken_;
};

void submit_and_wait(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                     const AllreduceOptions& options) {
  if (options.compression == Compression::none()) {
    submit_and_wait(reduction(inputs, outputs, options));
    return;
  }
  Travelling travelling(inputs, outputs, options);
  submit_and_wait(travelling.submission(options));
  travelling.take_out();
}

Handle<void> submit_only(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                         const AllreduceOptions& options) {
  if (options.compression == Compression::none())
    return submit_only(reduction(inputs, outputs, options));
  const auto travelling = std::make_shared<Travelling>(inputs, outputs, options);
  Submission submission = travelling->submission(options);
  submission.keep_alive = travelling;
  auto running = engine();
  auto pending = running->submit(std::move(submission));
  return {std::move(running), std::move(pending), [travelling] { travelling->take_out(); }};
}

/// Tries the fast path of repeated operations, in the type in which the tensor travels.
bool run_small(const Buffer& input, const Buffer& output, const AllreduceOptions& options) {
  if (!is_on_host(input) || !is_on_host(output) || input.dtype != output.dtype ||
      input.shape != output.shape)
    return false;
  SmallCall call = small_call(OpKind::Allreduce, input, output, options);
  if (options.compression == Compression::none()) return try_fast_path(call);
  require_running();
  options.compression.refuse_memory("allreduce");
  call.dtype = options.compression.wire_type(input.dtype);
  if (call.dtype == input.dtype) return try_fast_path(call);
  const std::int64_t count = element_count(input.shape);
  if (count <= 0 ||
      count > static_cast<std::int64_t>(limit(Limit::SlotBytes) / element_bytes(call.dtype)))
    return false;
  const auto elements = static_cast<std::size_t>(count);
  alignas(64) std::array<std::byte, limit(Limit::SlotBytes)> travelling;
  const auto world = current_world();
  world->convert(travelling.data(), call.dtype, input.data, input.dtype, elements);
  call.input = call.output = travelling.data();
  if (!world->engine->small_calls().try_run(call)) return false;
  world->convert(output.data, output.dtype, travelling.data(), call.dtype, elements);
  return true;
}

/// The same for a group, in the type that its tensors have.
bool run_small(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
               const AllreduceOptions& options) {
  const std::size_t count = inputs.size();
  if (count < 2 || count > limit(Limit::GroupTensors) || outputs.size() != count ||
      !(options.compression == Compression::none()))
    return false;
  std::array<SmallTensor, limit(Limit::GroupTensors)> tensors;
  for (std::size_t i = 0; i < count; ++i) {
    const Buffer &input = inputs[i], &output = outputs[i];
    if (!is_on_host(input) || !is_on_host(output) || input.dtype != inputs[0].dtype ||
        output.dtype != input.dtype || input.shape != output.shape)
      return false;
    tensors[i] = {input.data, output.data, input.shape};
  }
  SmallCall call = small_request(OpKind::Allreduce, options);
  call.dtype = inputs[0].dtype;
  call.group = std::span(tensors).first(count);
  return try_fast_path(call);
}

}  // namespace

Handle<void> allreduce_async(const Buffer& input, const Buffer& output,
                             const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (options.compression == Compression::none() && is_on_host(input) && is_on_host(output) &&
      input.dtype == output.dtype && input.shape == output.shape) {
    auto running = engine();
    if (auto pending = running->small_calls().start_unowned(
            small_call(OpKind::Allreduce, input, output, options), nullptr))
      return {std::move(running), std::move(pending), [] {}};
  }
  return submit_only({input}, {output}, options);
}
void allreduce(const Buffer& input, const Buffer& output, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (!run_small(input, output, options)) submit_and_wait({input}, {output}, options);
}
Handle<void> grouped_allreduce_async(const std::vector<Buffer>& inputs,
                                     const std::vector<Buffer>& outputs,
                                     const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(inputs, outputs, options);
}
void grouped_allreduce(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                       const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (!run_small(inputs, outputs, options)) submit_and_wait(inputs, outputs, options);
}
Handle<void> broadcast_async(const Buffer& buffer, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(broadcasting(buffer, options));
}
void broadcast(const Buffer& buffer, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  if (is_on_host(buffer) && try_fast_path(small_call(OpKind::Broadcast, buffer, buffer, options)))
    return;
  submit_and_wait(broadcasting(buffer, options));
}

}  // namespace hvd
