// Persistent operations on tensors. Plain host tensors go by a PersistentCall, which knows their
// memory; all else, and what autograd is to follow, is started as the `_async` form.
#include "hvd/api/persistent.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/in_place.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"

namespace hvd {

namespace {

/// A tensor whose memory and layout are to stay as they were.
class Unchanged {
 public:
  explicit Unchanged(at::Tensor tensor)
      : tensor_(std::move(tensor)),
        data_(tensor_.const_data_ptr()),
        type_(tensor_.scalar_type()),
        sizes_(tensor_.sizes().vec()),
        strides_(tensor_.strides().vec()) {}
  void check(OpKind kind, const std::string& name) const {
    if (tensor_.const_data_ptr() == data_ && tensor_.scalar_type() == type_ &&
        tensor_.sizes() == sizes_ && tensor_.strides() == strides_)
      return;
    throw InvalidArgument(
        formatted("{} '{}': a tensor's memory, type, shape or strides are not those that {}_init "
                  "was given ({} then, {} now); make the persistent operation anew",
                  name_of(kind), display_name(name), name_of(kind), to_string(sizes_),
                  to_string(detail::shape_of(tensor_))));
  }
  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
  const void* data_;
  at::ScalarType type_;
  Shape sizes_, strides_;
};

/// Holds what an operation works on as long as it is under way, whatever becomes of the tensors.
std::shared_ptr<void> keeping(const std::vector<at::Tensor>& tensors) {
  auto kept = std::make_shared<std::vector<c10::Storage>>();
  for (const auto& tensor : tensors) kept->push_back(tensor.storage());
  return kept;
}

/// An operation whose `_async` form changes one tensor and returns T.
template <class T, class Options>
class OnTensors : public PersistentWork<T> {
 public:
  void start() final {
    if (handle_ || (call_ && call_->is_under_way())) refuse_second_start(kind_, options_.name);
    check_memory();
    if (call_ && !autograd_follows()) {
      call_->start();
      detail::note_change(changed_.tensor());
    } else {
      const WorldScope scope(world_, WorldScope::kAlsoGlobal);
      require_same_engine(engine_.lock(), kind_, options_.name);
      handle_ = start_async();
    }
  }
  T wait() final {
    if (const auto handle = std::exchange(handle_, std::nullopt)) {
      last_ = handle->wait();
    } else if (call_ && call_->is_under_way()) {
      call_->wait();
      detail::note_change(changed_.tensor());  // backward may have been shown it meanwhile
      take_result(*call_);
    }
    return last_;
  }
  bool done() final { return handle_ ? handle_->done() : !call_ || call_->done(); }

 protected:
  OnTensors(OpKind kind, at::Tensor changed, Options options, T last)
      : kind_(kind),
        options_(std::move(options)),
        changed_(std::move(changed)),
        last_(std::move(last)) {}
  /// Checks what this rank can, and makes a name. `submission` lacks nothing else. `is_direct`: the
  /// engine can work on the memory as it is.
  void describe(Submission submission, void* output, bool is_direct,
                const std::vector<at::Tensor>& tensors) {
    auto running = engine();
    submission.allocate = [output](std::size_t /*index*/, std::int64_t /*rows*/) { return output; };
    running->check(submission);
    make_name(*running, kind_, options_);
    engine_ = running;
    if (!is_direct) return;
    submission.name = options_.name;
    submission.keep_alive = keeping(tensors);
    call_.emplace(std::move(running), std::move(submission), output);
  }
  virtual void check_memory() const { changed_.check(kind_, options_.name); }
  [[nodiscard]] virtual bool autograd_follows() const = 0;
  [[nodiscard]] virtual Handle<T> start_async() const = 0;
  virtual void take_result(const PersistentCall& /*call*/) {}

  const OpKind kind_;
  Options options_;
  const Unchanged changed_;
  T last_;  // what `wait()` returns

 private:
  const World world_ = World::current();
  std::weak_ptr<Engine> engine_;  // of that world, when it was made
  std::optional<PersistentCall> call_;
  std::optional<Handle<T>> handle_;  // of one that is under way
};

/// An allreduce or a broadcast.
template <class Options>
class InPlace final : public OnTensors<at::Tensor, Options> {
 public:
  using Async = Handle<at::Tensor> (*)(at::Tensor, const Options&);
  InPlace(OpKind kind, const at::Tensor& tensor, const Options& options, Async async)
      : OnTensors<at::Tensor, Options>(kind, checked(kind, tensor, options), options, tensor),
        async_(async) {
    const std::string what(name_of(kind));
    TensorArgument argument = detail::argument(tensor, tensor, what);
    bool is_direct = detail::is_plain(tensor);
    if constexpr (requires { options.compression; }) {
      options.compression.refuse_memory(what);
      const DataType wire = options.compression.wire_type(argument.dtype);
      is_direct = is_direct && wire == argument.dtype;
      argument.dtype = wire;
    }
    Submission submission = request(kind, options, detail::device_of(tensor));
    void* const output = argument.output;
    submission.tensors.push_back(std::move(argument));
    this->describe(std::move(submission), output, is_direct, {tensor});
  }

 private:
  static const at::Tensor& checked(OpKind kind, const at::Tensor& tensor, const Options& options) {
    detail::check_group({tensor}, name_of(kind), options.name, detail::Form::InPlace);
    return tensor;
  }
  [[nodiscard]] bool autograd_follows() const override {
    return detail::changes_history(this->changed_.tensor(), name_of(this->kind_),
                                   std::string(display_name(this->options_.name)));
  }
  [[nodiscard]] Handle<at::Tensor> start_async() const override {
    return async_(this->changed_.tensor(), this->options_);
  }

  const Async async_;
};

/// An allgather, alltoall or reducescatter into memory that exists.
template <class T, class Options>
class Into : public OnTensors<T, Options> {
 public:
  using Async = Handle<T> (*)(at::Tensor, const at::Tensor&, const Options&);
  Into(OpKind kind, const at::Tensor& output, const at::Tensor& input, const Options& options,
       Async async, T last, const std::vector<std::int64_t>& splits = {})
      : OnTensors<T, Options>(kind, checked(kind, output, input, options), options,
                              std::move(last)),
        input_(input),
        async_(async) {
    const std::string what = std::string(name_of(kind)) + "_init";
    const Buffer to = detail::buffer_of(output, what),
                 from = dealt(detail::buffer_of(input, what), options);
    check_output(kind, options.name, to, from, options.process_set, splits);
    Submission submission = request(kind, options, from.device);
    submission.tensors.push_back(detail::argument(input, {}, what));
    submission.tensors.front().shape = from.shape;
    submission.tensors.front().splits = splits;
    if (kind != OpKind::Reducescatter && output.dim() > 0)
      submission.tensors.front().output_rows = output.size(0);
    const bool is_direct =
        detail::is_plain(input) && detail::is_plain(output) && !overlap(to, from);
    void* const memory = is_direct ? output.mutable_data_ptr() : to.data;
    this->describe(std::move(submission), memory, is_direct, {output, input});
  }

 private:
  static const at::Tensor& checked(OpKind kind, const at::Tensor& output, const at::Tensor& input,
                                   const Options& options) {
    const at::NoGradGuard no_gradient;  // whether autograd would refuse the output, start() says
    const detail::Target refuses_others(output, input, kind, options.name);
    return output;
  }
  void check_memory() const final {
    this->changed_.check(this->kind_, this->options_.name);
    input_.check(this->kind_, this->options_.name);
  }
  [[nodiscard]] bool autograd_follows() const final {
    return at::GradMode::is_enabled() &&
           (input_.tensor().requires_grad() || this->changed_.tensor().requires_grad());
  }
  [[nodiscard]] Handle<T> start_async() const final {
    return async_(this->changed_.tensor(), input_.tensor(), this->options_);
  }

  const Unchanged input_;
  const Async async_;
};

class Exchange final : public Into<AlltoallResult, AlltoallOptions> {
 public:
  Exchange(const at::Tensor& output, const at::Tensor& input, const AlltoallOptions& options)
      : Into(OpKind::Alltoall, output, input, options, &alltoall_into_async, {output, {}},
             detail::splits_of(input, options)) {}

 private:
  void take_result(const PersistentCall& call) override {
    last_.received_splits =
        detail::received_splits(call.received(), detail::device_of_splits(options_));
  }
};

/// Returns memory for a result; what is a scalar, and refused later, as one. `sizes`: gives those
/// of the result.
template <class Sizes>
at::Tensor output_for(OpKind kind, const at::Tensor& input, const std::string& name,
                      const Sizes& sizes) {
  detail::check_group({input}, name_of(kind), name, detail::Form::Fresh);
  return detail::empty_shared(input.dim() == 0 ? Shape() : sizes(input.sizes().vec()),
                              input.options().requires_grad(false));
}

/// Returns the sizes of what this rank gets of a tensor of these.
Shape scattered(Shape sizes, const ReducescatterOptions& options) {
  const auto ranks = static_cast<std::size_t>(options.process_set.size());
  // -1 is refused later
  const auto self = static_cast<std::size_t>(std::max(options.process_set.rank(), 0));
  if (options.counts.empty()) {
    sizes.front() = scattered_rows(sizes.front(), ranks, self);
  } else {
    sizes = {options.counts.size() == ranks ? std::max<std::int64_t>(options.counts[self], 0) : 0};
  }
  return sizes;
}

template <class Options>
PersistentHandle<at::Tensor> in_place(OpKind kind, const at::Tensor& tensor, const Options& options,
                                      typename InPlace<Options>::Async async) {
  return PersistentHandle<at::Tensor>(
      std::make_unique<InPlace<Options>>(kind, tensor, options, async));
}
template <class Options>
PersistentHandle<at::Tensor> into(OpKind kind, const at::Tensor& output, const at::Tensor& input,
                                  const Options& options,
                                  typename Into<at::Tensor, Options>::Async async) {
  return PersistentHandle<at::Tensor>(std::make_unique<Into<at::Tensor, Options>>(
      kind, output, input, options, async, output, counts_of(options)));
}

}  // namespace

PersistentHandle<at::Tensor> allreduce_init(at::Tensor tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return in_place(OpKind::Allreduce, tensor, options, &allreduce_async_);
}
PersistentHandle<at::Tensor> broadcast_init(at::Tensor tensor, const BroadcastOptions& options) {
  const WorldScope scope(options.world);
  return in_place(OpKind::Broadcast, tensor, options, &broadcast_async_);
}
PersistentHandle<at::Tensor> allgather_init(at::Tensor output, const at::Tensor& input,
                                            const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return into(OpKind::Allgather, output, input, options, &allgather_into_async);
}
PersistentHandle<at::Tensor> allgather_init(const at::Tensor& input,
                                            const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  const auto of_all = [&](Shape sizes) {
    sizes.front() *= options.process_set.size();
    return sizes;
  };
  return allgather_init(output_for(OpKind::Allgather, input, options.name, of_all), input, options);
}
PersistentHandle<AlltoallResult> alltoall_init(at::Tensor output, const at::Tensor& input,
                                               const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  AlltoallOptions own = options;  // the caller may use the splits again
  if (own.splits && own.splits->defined()) own.splits = own.splits->detach().clone();
  return PersistentHandle<AlltoallResult>(std::make_unique<Exchange>(output, input, own));
}
PersistentHandle<AlltoallResult> alltoall_init(const at::Tensor& input,
                                               const AlltoallOptions& options) {
  const WorldScope scope(options.world);
  const at::Tensor output =
      output_for(OpKind::Alltoall, input, options.name, [](Shape sizes) { return sizes; });
  if (options.splits)
    throw InvalidArgument(formatted(
        "alltoall_init '{}': with splits, give it an output that has as many rows as come",
        options.name));
  return alltoall_init(output, input, options);
}
PersistentHandle<at::Tensor> reducescatter_init(at::Tensor output, const at::Tensor& input,
                                                const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return into(OpKind::Reducescatter, output, input, options, &reducescatter_into_async);
}
PersistentHandle<at::Tensor> reducescatter_init(const at::Tensor& input,
                                                const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  const auto own = [&](Shape sizes) { return scattered(std::move(sizes), options); };
  return reducescatter_init(output_for(OpKind::Reducescatter, input, options.name, own), input,
                            options);
}

}  // namespace hvd
