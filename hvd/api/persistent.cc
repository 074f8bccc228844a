#include "hvd/api/persistent.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/api/request.h"
#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

// ----------------------------------------------------------------------------- for both front ends

PersistentCall::PersistentCall(std::shared_ptr<Engine> engine, Submission submission, void* output)
    : engine_(std::move(engine)), submission_(std::move(submission)) {
  const TensorArgument& tensor = submission_.tensors.front();
  if (submission_.kind == OpKind::Alltoall) received_.resize(tensor.splits.size());
  call_ = call_of(submission_);
  call_.output = output;
  call_.received = received_;
  call_.known = &known_;
  const std::int64_t bytes =
      element_count(tensor.shape) * static_cast<std::int64_t>(element_bytes(tensor.dtype));
  is_small_ = submission_.device == Device() && tensor.input != nullptr && output != nullptr &&
              routes::may_repeat(call_.kind, bytes);
}

PersistentCall::~PersistentCall() {
  try {
    if (submission_.keep_alive == nullptr) {
      wait();
    } else if (op_) {
      engine_->small_calls().abandon(op_, submission_.keep_alive);
    }
  } catch (const std::exception&) {
    // Nobody asks any more what it failed with.
  }
}

void PersistentCall::start() {
  if (is_under_way()) refuse_second_start(submission_.kind, submission_.name);
  if (is_small_) op_ = engine_->small_calls().start(call_, After::Repeat);
  if (op_) return;
  const WorldScope scope(world_, WorldScope::kAlsoGlobal);
  require_same_engine(engine_, submission_.kind, submission_.name);
  pending_ = engine_->submit(submission_, After::Repeat);
}

void PersistentCall::wait() {
  if (const auto op = std::exchange(op_, nullptr)) return engine_->small_calls().finish(*op, call_);
  const auto pending = std::exchange(pending_, nullptr);
  if (!pending) return;
  engine_->wait(*pending);
  if (submission_.kind == OpKind::Alltoall)
    received_.assign(pending->rows.front().begin(), pending->rows.front().end());
}

bool PersistentCall::done() const {
  if (!is_under_way()) return true;
  return engine_->poll(op_ ? *op_->pending : *pending_);
}

void require_same_engine(const std::shared_ptr<Engine>& made_with, OpKind kind,
                         const std::string& name) {
  if (engine() == made_with) return;
  throw InvalidArgument(
      formatted("{} '{}': hvd::shutdown() and hvd::init() have been called since the persistent "
                "operation was made; make it anew",
                name_of(kind), display_name(name)));
}

void refuse_second_start(OpKind kind, const std::string& name) {
  throw InvalidArgument(
      formatted("{} '{}': start() of a persistent operation that is under way; call wait() first",
                name_of(kind), display_name(name)));
}

// -------------------------------------------------------------------------------------- on buffers

namespace {

/// T: nothing, or the rows that came from each rank.
template <class T>
class OnBuffers final : public PersistentWork<T> {
 public:
  OnBuffers(std::shared_ptr<Engine> engine, Submission submission, void* output,
            std::optional<Detour> detour)
      : detour_(std::move(detour)), call_(std::move(engine), std::move(submission), output) {}
  void start() override {
    if (detour_ && !call_.is_under_way()) detour_->enter();
    call_.start();
  }
  T wait() override {
    const bool was_under_way = call_.is_under_way();
    call_.wait();
    if (detour_ && was_under_way) detour_->leave();
    if constexpr (!std::is_void_v<T>) return call_.received();
  }
  bool done() override { return call_.done(); }

 private:
  const std::optional<Detour> detour_;
  PersistentCall call_;
};

/// Makes the operation of a submission that lacks a tensor only. `output`: of what goes into memory
/// that exists; otherwise `tensor` has it.
template <class T, class Options>
PersistentHandle<T> make(OpKind kind, Options options, TensorArgument tensor, const Device& device,
                         void* output, std::optional<Detour> detour) {
  auto running = engine();
  const auto submission = [&] {
    Submission made = request(kind, options, device);
    made.tensors.push_back(tensor);
    if (tensor.output == nullptr)
      made.allocate = [output](std::size_t /*index*/, std::int64_t /*rows*/) { return output; };
    return made;
  };
  running->check(submission());
  make_name(*running, kind, options);
  return PersistentHandle<T>(
      std::make_unique<OnBuffers<T>>(running, submission(), output, std::move(detour)));
}

/// Makes one whose result goes to `output`.
template <class T, class Options>
PersistentHandle<T> make_into(OpKind kind, const Buffer& output, const Buffer& input,
                              const Options& options, std::vector<std::int64_t> splits) {
  check_output(kind, options.name, output, input, options.process_set, splits);
  if (overlap(output, input) && input.device != Device())
    throw InvalidArgument(
        formatted("{}_init '{}': the output overlaps the input; give it memory of its own",
                  name_of(kind), options.name));
  // of an input that others may still read when this rank writes its output
  std::optional<Detour> detour;
  if (overlap(input, output)) detour.emplace(input, Buffer(), input.dtype);
  TensorArgument tensor{detour ? detour->memory() : input.data, nullptr, input.dtype, input.shape};
  tensor.splits = std::move(splits);
  if (kind != OpKind::Reducescatter && !output.shape.empty())
    tensor.output_rows = output.shape.front();
  return make<T>(kind, options, std::move(tensor), input.device, output.data, std::move(detour));
}

}  // namespace

PersistentHandle<void> allreduce_init(const Buffer& input, const Buffer& output,
                                      const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  require_running();
  options.compression.refuse_memory("allreduce");
  if (input.dtype != output.dtype || input.shape != output.shape || input.device != output.device)
    throw InvalidArgument(formatted(
        "allreduce '{}': input is {} {}, output {} {}; they must be alike, and on one device",
        options.name, name_of(input.dtype), to_string(input.shape), name_of(output.dtype),
        to_string(output.shape)));
  const DataType wire = options.compression.wire_type(input.dtype);
  const bool has_memory = input.data != nullptr && output.data != nullptr;
  if (wire != input.dtype &&
      (input.device != Device() || (!has_memory && element_count(input.shape) > 0)))
    throw InvalidArgument(formatted(
        "allreduce '{}': compression needs input and output in host memory", options.name));
  std::optional<Detour> detour;
  if (wire != input.dtype && has_possible_sizes(input.shape)) detour.emplace(input, output, wire);
  void* const from = detour ? detour->memory() : input.data;
  void* const to = detour ? detour->memory() : output.data;
  TensorArgument tensor{from, to, wire, input.shape};
  tensor.padded = output.padded && !detour;
  return make<void>(OpKind::Allreduce, options, std::move(tensor), input.device, to,
                    std::move(detour));
}
PersistentHandle<void> allreduce_init(const Buffer& buffer, const AllreduceOptions& options) {
  return allreduce_init(buffer, buffer, options);
}
PersistentHandle<void> broadcast_init(const Buffer& buffer, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  return make<void>(OpKind::Broadcast, options,
                    {buffer.data, buffer.data, buffer.dtype, buffer.shape}, buffer.device,
                    buffer.data, std::nullopt);
}
PersistentHandle<void> allgather_init(const Buffer& output, const Buffer& input,
                                      const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return make_into<void>(OpKind::Allgather, output, input, options, {});
}
PersistentHandle<std::vector<std::int64_t>> alltoall_init(const Buffer& output, const Buffer& input,
                                                          const AlltoallBufferOptions& options) {
  const WorldScope scope(options.world);
  return make_into<std::vector<std::int64_t>>(OpKind::Alltoall, output, input, options,
                                              splits_of(input, options));
}
PersistentHandle<void> reducescatter_init(const Buffer& output, const Buffer& input,
                                          const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return make_into<void>(OpKind::Reducescatter, output, dealt(input, options), options,
                         options.counts);
}

}  // namespace hvd
