#include "torch_bindings/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "hvd/engine.h"
#include "hvd/text.h"
#include "torch_bindings/device.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

using Tensors = std::vector<at::Tensor>;
enum class Form { Fresh, InPlace };

/// Holds every tensor of an operation until it is done, and knows how its results become what the user gets.
struct Operation {
  Submission submission;
  Tensors given;                                    ///< as the user gave them
  Tensors sent;                                     ///< dense, in the wire's type
  Tensors received;                                 ///< dense, in the wire's type; the same as `sent` where the operation works in place
  Tensors results;                                  ///< what the user gets
  std::function<Tensors(const Tensors&)> backward;  ///< gradients of the given tensors from those of the results
  std::vector<std::shared_ptr<void>> events;
  using Rows = std::vector<std::vector<std::int64_t>>;
  std::shared_ptr<Rows> rows = std::make_shared<Rows>();  ///< as in Pending, once it is done

  void add(const at::Tensor& to_send, const at::Tensor& to_receive, std::string_view what) {
    TensorArgument argument = detail::argument(to_send, to_receive, what);
    if (auto event = detail::ready_event(to_send)) {
      argument.ready_event = event.get();
      events.push_back(std::move(event));
    }
    submission.tensors.push_back(std::move(argument));
    sent.push_back(to_send);
    received.push_back(to_receive);
  }
};

void check_group(const Tensors& tensors, std::string_view what, Form form) {
  if (tensors.empty()) throw InvalidArgument(formatted("{}: an empty group of tensors", what));
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) throw InvalidArgument(formatted("{}: an undefined tensor", what));
    if (tensor.is_sparse()) throw InvalidArgument(formatted("{}: a sparse tensor; make it dense first", what));
    if (form == Form::InPlace && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      throw InvalidArgument(formatted("{}: in place on a tensor whose elements share memory (as after expand()); clone it first", what));
    if (tensor.device() != tensors.front().device())
      throw InvalidArgument(formatted("{}: the tensors of a group must be on one device, not on {} and {}", what,
                                      tensors.front().device().str(), tensor.device().str()));
  }
}

/// The tensor's values as they are read: contiguous, neither lazily conjugated nor negated. The tensor itself where it is so already.
at::Tensor dense_of(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

/// To be asked where the user's grad mode still holds.
bool needs_gradient(const Tensors& tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.requires_grad(); });
}

/// Ties results that were computed elsewhere to their inputs. Keeps the rule for the gradients alone: holding the operation would
/// be a cycle, as the results hold this.
class Communicated : public torch::autograd::Function<Communicated> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList /*given*/,
                                                const Operation* operation) {
    context->saved_data["rule"] = c10::IValue::make_capsule(c10::make_intrusive<Rule>(operation->backward));
    return operation->results;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto rule = context->saved_data["rule"].toCapsule();
    auto result = static_cast<const Rule*>(rule.get())->backward(gradients);
    result.emplace_back();  // none for the operation itself
    return result;
  }

 private:
  struct Rule : torch::CustomClassHolder {
    explicit Rule(std::function<Tensors(const Tensors&)> function) : backward(std::move(function)) {}
    std::function<Tensors(const Tensors&)> backward;
  };
};

/// What `wait()` returns.
Tensors finish(const std::shared_ptr<Operation>& operation, const Pending& pending) {
  *operation->rows = pending.rows;
  for (std::size_t i = 0; i < operation->results.size(); ++i) {
    if (!operation->received[i].defined()) continue;
    detail::wait_on_current_stream(operation->received[i], pending.completions);
    if (!operation->results[i].is_same(operation->received[i])) {
      const at::NoGradGuard no_gradient;
      operation->results[i].copy_(operation->received[i]);
      operation->received[i] = operation->results[i];
    }
  }
  if (!operation->backward) return operation->results;
  // A TensorList: autograd would not look into a vector.
  return Communicated::apply(at::TensorList(operation->given), static_cast<const Operation*>(operation.get()));
}

Handle<Tensors> start(const std::shared_ptr<Operation>& operation, After after) {
  auto running = engine();
  operation->submission.keep_alive = operation;
  Submission submission = std::move(operation->submission);
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  auto pending = running->submit(std::move(submission), after);
  // A handle may be waited for more than once; what the first wait gave is given again.
  struct Once {
    std::once_flag flag;
    Tensors results;
  };
  auto result = [operation, pending, once = std::make_shared<Once>()] {
    std::call_once(once->flag, [&] { once->results = finish(operation, *pending); });
    return once->results;
  };
  return {std::move(running), std::move(pending), std::move(result)};
}

/// The handle of a group of one. In-place forms return the tensor they were given.
Handle<at::Tensor> first(const Handle<Tensors>& handle) {
  return handle.map<at::Tensor>([](const Tensors& tensors) { return tensors.front(); });
}
Handle<at::Tensor> first(const Handle<Tensors>& handle, const at::Tensor& given) {
  return handle.map<at::Tensor>([given](const Tensors&) { return given; });
}

// ----------------------------------------------------------------------------------------------------------------- allreduce

std::shared_ptr<Operation> allreduction(const Tensors& tensors, const AllreduceOptions& options, Form form) {
  constexpr std::string_view kWhat = "allreduce";
  check_group(tensors, kWhat, form);
  options.compression.refuse_memory(kWhat);
  const bool differentiable = form == Form::Fresh && needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Allreduce;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.op = options.op;
  submission.prescale_factor = options.prescale_factor;
  submission.postscale_factor = options.postscale_factor;
  submission.device = detail::device_of(tensors.front());
  const at::NoGradGuard no_gradient;
  for (const auto& tensor : tensors) {
    const DataType dtype = detail::data_type_of(tensor, kWhat);
    const DataType wire = options.compression.wire_type(dtype);
    const at::Tensor dense = dense_of(tensor);
    if (wire != dtype) {
      const at::Tensor packed = detail::empty_shared(tensor.sizes(), dense.options().dtype(detail::scalar_type_of(wire)));
      packed.copy_(dense);
      operation->add(packed, packed, kWhat);
      operation->results.push_back(form == Form::InPlace ? tensor : at::empty(tensor.sizes(), dense.options()));
    } else if (form == Form::InPlace) {
      operation->add(dense, dense, kWhat);
      operation->results.push_back(dense.is_alias_of(tensor) ? dense : tensor);
    } else {
      const at::Tensor output = detail::empty_shared(tensor.sizes(), dense.options());
      operation->add(dense, output, kWhat);
      operation->results.push_back(output);
    }
  }
  if (differentiable) {
    operation->backward = [options](const Tensors& gradients) {
      AllreduceOptions same = options;
      if (!same.name.empty()) same.name += ".gradient";
      return grouped_allreduce(gradients, same);
    };
  }
  return operation;
}

Tensors in_place(const Tensors& tensors, const std::shared_ptr<Operation>& operation, After after) {
  start(operation, after).wait();
  return tensors;
}

// ----------------------------------------------------------------------------------------------------------------- allgather

/// Results are made when their number of rows is known.
void allocate_rows(const std::shared_ptr<Operation>& operation) {
  operation->results.resize(operation->given.size());
  operation->submission.allocate = [held = std::weak_ptr<Operation>(operation)](std::size_t index, std::int64_t rows) -> void* {
    const auto made = held.lock();
    auto sizes = made->sent[index].sizes().vec();
    sizes.front() = rows;
    made->results[index] = made->received[index] = at::empty(sizes, made->sent[index].options());
    return made->results[index].mutable_data_ptr();
  };
}

std::shared_ptr<Operation> gathering(const Tensors& tensors, const AllgatherOptions& options) {
  constexpr std::string_view kWhat = "allgather";
  check_group(tensors, kWhat, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Allgather;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.device = detail::device_of(tensors.front());
  for (const auto& tensor : tensors) operation->add(dense_of(tensor), {}, kWhat);
  allocate_rows(operation);
  if (needs_gradient(tensors)) {
    operation->backward = [options, rows = operation->rows](const Tensors& gradients) {
      const std::string name = options.name.empty() ? "" : options.name + ".gradient";
      const Tensors means = grouped_allreduce(gradients, {.name = name, .process_set = options.process_set});
      const auto self = static_cast<std::size_t>(options.process_set.rank());
      Tensors own;
      for (std::size_t i = 0; i < means.size(); ++i) {
        const auto& of_ranks = rows->at(i);
        const auto begin = std::accumulate(of_ranks.begin(), of_ranks.begin() + static_cast<std::ptrdiff_t>(self), std::int64_t{0});
        own.push_back(means[i].slice(0, begin, begin + of_ranks[self]));
      }
      return own;
    };
  }
  return operation;
}

// ------------------------------------------------------------------------------------------------- reducescatter and alltoall

std::shared_ptr<Operation> scattering(const Tensors& tensors, const ReducescatterOptions& options) {
  constexpr std::string_view kWhat = "reducescatter";
  check_group(tensors, kWhat, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Reducescatter;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.op = options.op;
  submission.prescale_factor = options.prescale_factor;
  submission.postscale_factor = options.postscale_factor;
  submission.device = detail::device_of(tensors.front());
  for (const auto& tensor : tensors) operation->add(dense_of(tensor), {}, kWhat);
  allocate_rows(operation);
  if (needs_gradient(tensors)) {
    operation->backward = [options](const Tensors& gradients) {
      const std::string name = options.name.empty() ? "" : options.name + ".gradient";
      const double ranks = options.op == ReduceOp::Sum ? options.process_set.size() : 1;
      Tensors whole = grouped_allgather(gradients, {.name = name, .process_set = options.process_set});
      for (auto& gradient : whole) gradient.mul_(ranks * options.prescale_factor * options.postscale_factor);
      return whole;
    };
  }
  return operation;
}

std::vector<std::int64_t> splits_of(const at::Tensor& tensor, const AlltoallOptions& options) {
  const int ranks = options.process_set.size();
  if (!options.splits) return tensor.dim() == 0 ? std::vector<std::int64_t>{} : even_splits(tensor.size(0), ranks, options.name);
  const at::Tensor& splits = *options.splits;
  const bool whole = splits.defined() && (splits.scalar_type() == at::kInt || splits.scalar_type() == at::kLong);
  if (!whole || splits.dim() != 1)
    throw InvalidArgument(formatted("alltoall '{}': splits must be a 1-D tensor of int32 or int64", options.name));
  const at::Tensor here = splits.detach().to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

std::shared_ptr<Operation> exchanging(const at::Tensor& tensor, const AlltoallOptions& options) {
  constexpr std::string_view kWhat = "alltoall";
  check_group({tensor}, kWhat, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = {tensor};
  Submission& submission = operation->submission;
  submission.kind = OpKind::Alltoall;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.device = detail::device_of(tensor);
  operation->add(dense_of(tensor), {}, kWhat);
  const auto splits = splits_of(tensor, options);
  submission.tensors.front().splits = splits;
  allocate_rows(operation);
  if (needs_gradient({tensor})) {
    const std::int64_t unsent = tensor.size(0) - std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    operation->backward = [options, unsent, rows = operation->rows](const Tensors& gradients) {
      AlltoallOptions back{
          .name = options.name.empty() ? "" : options.name + ".gradient", .splits = {}, .process_set = options.process_set};
      back.splits = torch::tensor(rows->at(0));
      at::Tensor gradient = alltoall(gradients.front(), back).output;
      if (unsent > 0) {
        auto sizes = gradient.sizes().vec();
        sizes.front() = unsent;
        gradient = at::cat({gradient, at::zeros(sizes, gradient.options())});
      }
      return Tensors{gradient};
    };
  }
  return operation;
}

Handle<AlltoallResult> start(const std::shared_ptr<Operation>& operation, const AlltoallOptions& options, After after) {
  const at::Device device = options.splits ? options.splits->device() : at::Device(at::kCPU);
  return start(operation, after).map<AlltoallResult>([rows = operation->rows, device](const Tensors& tensors) {
    return AlltoallResult{tensors.front(), torch::tensor(rows->at(0), at::kLong).to(device, at::kInt)};
  });
}

// ----------------------------------------------------------------------------------------------------------------- broadcast

std::shared_ptr<Operation> broadcasting(const Tensors& tensors, const BroadcastOptions& options, Form form) {
  constexpr std::string_view kWhat = "broadcast";
  check_group(tensors, kWhat, form);
  const bool differentiable = form == Form::Fresh && needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Broadcast;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.root = options.root_rank;
  submission.device = detail::device_of(tensors.front());
  const at::NoGradGuard no_gradient;
  for (const auto& tensor : tensors) {
    const at::Tensor dense = dense_of(tensor);
    if (form == Form::InPlace) {
      operation->add(dense, dense, kWhat);
      operation->results.push_back(dense.is_alias_of(tensor) ? dense : tensor);
    } else {
      const at::Tensor output = detail::empty_shared(tensor.sizes(), dense.options());
      operation->add(dense, output, kWhat);
      operation->results.push_back(output);
    }
  }
  if (differentiable) {
    operation->backward = [options](const Tensors& gradients) {
      AllreduceOptions average{.name = options.name.empty() ? "" : options.name + ".gradient", .process_set = options.process_set};
      Tensors means = grouped_allreduce(gradients, average);
      if (rank() != options.root_rank)
        for (auto& mean : means) mean.zero_();
      return means;
    };
  }
  return operation;
}

// ------------------------------------------------------------------------------------- small operations, without an Operation

/// Whether the engine can work on the tensor as it is.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

template <class Options>
Immediate immediate(OpKind kind, const at::Tensor& tensor, const Options& options) {
  Immediate call;
  call.kind = kind;
  call.process_set = options.process_set.id();
  call.name = options.name;
  call.dtype = detail::data_type_of(tensor, name_of(kind));
  call.shape = {tensor.sizes().data(), tensor.sizes().size()};
  call.input = tensor.const_data_ptr();
  if constexpr (requires { options.prescale_factor; }) {
    call.op = options.op;
    call.prescale_factor = options.prescale_factor;
    call.postscale_factor = options.postscale_factor;
  }
  if constexpr (requires { options.root_rank; }) call.root = options.root_rank;
  return call;
}

bool run(Immediate& call, const at::Tensor& output) {
  call.output = output.mutable_data_ptr();
  return engine()->run_immediately(call);
}

bool is_small(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()) <= kLaneBytes; }

bool may_run(const at::Tensor& tensor, const AllreduceOptions& options) {
  return is_plain(tensor) && is_small(tensor) && options.compression == Compression::none();
}

/// Results whose number of rows the engine knows.
struct Rows {
  const at::Tensor& input;
  at::Tensor result;
  static void* allocate(void* context, std::int64_t rows) {
    auto& self = *static_cast<Rows*>(context);
    auto sizes = self.input.sizes().vec();
    sizes.front() = rows;
    self.result = at::empty(sizes, self.input.options().requires_grad(false));
    return self.result.mutable_data_ptr();
  }
};

/// An undefined tensor if the operation must be submitted.
template <class Options>
at::Tensor run_by_rows(OpKind kind, const at::Tensor& tensor, const Options& options) {
  if (!is_plain(tensor) || !is_small(tensor) || tensor.dim() == 0 || needs_gradient({tensor})) return {};
  Immediate call = immediate(kind, tensor, options);
  Rows rows{tensor, {}};
  call.allocate = &Rows::allocate;
  call.context = &rows;
  return engine()->run_immediately(call) ? rows.result : at::Tensor();
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (may_run(tensor, options) && !needs_gradient({tensor})) {
    Immediate call = immediate(OpKind::Allreduce, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false)); run(call, output)) return output;
  }
  return start(allreduction({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options) {
  if (may_run(tensor, options)) {
    Immediate call = immediate(OpKind::Allreduce, tensor, options);
    if (run(call, tensor)) return tensor;
  }
  return in_place({tensor}, allreduction({tensor}, options, Form::InPlace), After::Wait).front();
}
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  return first(start(allreduction({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options) {
  return first(start(allreduction({tensor}, options, Form::InPlace), After::Return), tensor);
}

Tensors grouped_allreduce(const Tensors& tensors, const AllreduceOptions& options) {
  return start(allreduction(tensors, options, Form::Fresh), After::Wait).wait();
}
Tensors grouped_allreduce_(Tensors tensors, const AllreduceOptions& options) {
  return in_place(tensors, allreduction(tensors, options, Form::InPlace), After::Wait);
}
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const AllreduceOptions& options) {
  return start(allreduction(tensors, options, Form::Fresh), After::Return);
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const AllreduceOptions& options) {
  return start(allreduction(tensors, options, Form::InPlace), After::Return).map<Tensors>([tensors](const Tensors&) { return tensors; });
}

at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options) {
  if (const auto gathered = run_by_rows(OpKind::Allgather, tensor, options); gathered.defined()) return gathered;
  return start(gathering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> allgather_async(const at::Tensor& tensor, const AllgatherOptions& options) {
  return first(start(gathering({tensor}, options), After::Return));
}
Tensors grouped_allgather(const Tensors& tensors, const AllgatherOptions& options) {
  return start(gathering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_allgather_async(const Tensors& tensors, const AllgatherOptions& options) {
  return start(gathering(tensors, options), After::Return);
}

at::Tensor broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  if (is_plain(tensor) && is_small(tensor) && !needs_gradient({tensor})) {
    Immediate call = immediate(OpKind::Broadcast, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false)); run(call, output)) return output;
  }
  return start(broadcasting({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor broadcast_(at::Tensor tensor, const BroadcastOptions& options) {
  if (is_plain(tensor) && is_small(tensor)) {
    Immediate call = immediate(OpKind::Broadcast, tensor, options);
    if (run(call, tensor)) return tensor;
  }
  return in_place({tensor}, broadcasting({tensor}, options, Form::InPlace), After::Wait).front();
}
Handle<at::Tensor> broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  return first(start(broadcasting({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> broadcast_async_(at::Tensor tensor, const BroadcastOptions& options) {
  return first(start(broadcasting({tensor}, options, Form::InPlace), After::Return), tensor);
}

at::Tensor reducescatter(const at::Tensor& tensor, const ReducescatterOptions& options) {
  if (const auto own = run_by_rows(OpKind::Reducescatter, tensor, options); own.defined()) return own;
  return start(scattering({tensor}, options), After::Wait).wait().front();
}
Handle<at::Tensor> reducescatter_async(const at::Tensor& tensor, const ReducescatterOptions& options) {
  return first(start(scattering({tensor}, options), After::Return));
}
Tensors grouped_reducescatter(const Tensors& tensors, const ReducescatterOptions& options) {
  return start(scattering(tensors, options), After::Wait).wait();
}
Handle<Tensors> grouped_reducescatter_async(const Tensors& tensors, const ReducescatterOptions& options) {
  return start(scattering(tensors, options), After::Return);
}

AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options) {
  return start(exchanging(tensor, options), options, After::Wait).wait();
}
Handle<AlltoallResult> alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options) {
  return start(exchanging(tensor, options), options, After::Return);
}

namespace detail {
Handle<Tensors> grouped_broadcast_async_(Tensors tensors, std::vector<std::string> names, const BroadcastOptions& options) {
  const auto operation = broadcasting(tensors, options, Form::InPlace);
  for (std::size_t i = 0; i < names.size(); ++i) operation->submission.tensors.at(i).name = std::move(names[i]);
  return start(operation, After::Return);
}
}  // namespace detail

}  // namespace hvd
