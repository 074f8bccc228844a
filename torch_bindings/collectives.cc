#include "torch_bindings/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/device.h"
#include "torch_bindings/history.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

using Tensors = std::vector<at::Tensor>;
enum class Form { Fresh, InPlace };

/// Holds every tensor of an operation until it is done, and knows how its results become what the user gets.
struct Operation {
  Submission submission;
  Tensors given;                  ///< as the user gave them
  Tensors sent;                   ///< dense, in the wire's type
  Tensors received;               ///< dense, in the wire's type; the same as `sent` where the operation works in place
  Tensors results;                ///< what the user gets
  detail::GradientRule backward;  ///< gradients of the given tensors from those of the results
  bool in_place = false;          ///< `given` are changed
  std::vector<std::shared_ptr<void>> events;
  using Rows = std::vector<std::vector<std::int64_t>>;
  std::shared_ptr<Rows> rows = std::make_shared<Rows>();  ///< as in HandleState, once it is done

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

/// "allreduce 'loss'", and of a group of several also which of them.
std::string title(std::string_view what, const std::string& name, const Tensors& group, std::size_t index) {
  std::string text = name.empty() ? std::string(what) : formatted("{} '{}'", what, name);
  if (group.size() > 1) text += formatted(", tensor {} of the group (0 to {})", index, group.size() - 1);
  return text;
}

void check_group(const Tensors& tensors, std::string_view what, const std::string& name, Form form) {
  if (tensors.empty()) throw InvalidArgument(formatted("{}: an empty group of tensors", title(what, name, tensors, 0)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const auto refuse = [&](const std::string& why) { throw InvalidArgument(title(what, name, tensors, i) + ": " + why); };
    if (!tensor.defined()) refuse("an undefined tensor; a rank that has nothing to give gives zeros, or no rows where rows are gathered");
    if (tensor.layout() != at::kStrided) refuse(formatted("a tensor of layout {}; make it dense first", c10::str(tensor.layout())));
    if (!detail::is_carried(tensor.scalar_type()))
      refuse(formatted("tensors of type {} are not supported", at::toString(tensor.scalar_type())));
    if (!tensor.is_cpu() && !tensor.is_cuda()) refuse(formatted("tensors on {} are not supported", tensor.device().str()));
    if (form == Form::InPlace && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      refuse("in place on a tensor whose elements share memory (as after expand()); clone it first");
    if (tensor.device() != tensors.front().device())
      refuse(formatted("the tensors of a group must be on one device, not on {} and {}", tensors.front().device().str(),
                       tensor.device().str()));
  }
}

/// The tensor's values as they are read: contiguous, neither lazily conjugated nor negated. The tensor itself where it is so already.
at::Tensor dense_of(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

/// To be asked where the user's grad mode still holds.
bool needs_gradient(const Tensors& tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.requires_grad(); });
}

/// What `wait()` returns.
Tensors finish(const std::shared_ptr<Operation>& operation, const HandleState& pending) {
  *operation->rows = pending.rows;
  for (std::size_t i = 0; i < operation->results.size(); ++i) {
    if (!operation->received[i].defined()) continue;
    detail::wait_on_current_stream(operation->received[i], pending.completions);
    if (!operation->results[i].is_same(operation->received[i])) {
      const c10::InferenceMode as_it_was_made(operation->results[i].is_inference());
      const at::NoGradGuard no_gradient;
      operation->results[i].copy_(operation->received[i]);
      operation->received[i] = operation->results[i];
    }
  }
  if (operation->in_place) {
    for (const auto& tensor : operation->given) detail::note_change(tensor);  // backward may have been shown it meanwhile
    return operation->given;
  }
  return operation->backward ? detail::tied(operation->given, operation->results, operation->backward) : operation->results;
}

Handle<Tensors> start(const std::shared_ptr<Operation>& operation, After after) {
  auto running = engine();
  operation->submission.keep_alive = operation;
  Submission submission = std::move(operation->submission);
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  auto pending = running->submit(std::move(submission), after);
  if (operation->in_place)
    for (const auto& tensor : operation->given) detail::note_change(tensor);  // from now on
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

/// The handle of a group of one.
Handle<at::Tensor> first(const Handle<Tensors>& handle) {
  return handle.map<at::Tensor>([](const Tensors& tensors) { return tensors.front(); });
}

// ------------------------------------------------------------------------------------------------------------ forms in place

/// Which of the tensors share memory with another that begins before them, or is before them in the group and begins there too. Those are
/// sent from a copy, so that all are read before any is changed. `dense`: without gaps.
std::vector<bool> sharing_memory(const Tensors& dense) {
  std::vector<bool> shares(dense.size(), false);
  if (dense.size() < 2) return shares;
  std::vector<std::pair<std::uintptr_t, std::size_t>> places;
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (dense[i].numel() > 0) places.emplace_back(reinterpret_cast<std::uintptr_t>(dense[i].const_data_ptr()), i);
  std::sort(places.begin(), places.end());
  std::uintptr_t end = 0;
  for (const auto& [begin, i] : places) {
    shares[i] = begin < end;
    end = std::max(end, begin + dense[i].nbytes());
  }
  return shares;
}

/// The tensors as an operation in place reads and writes them; those that it cannot are copied, and written when it is done.
Tensors dense_in_place(const Tensors& tensors) {
  Tensors dense;
  for (const auto& tensor : tensors) dense.push_back(dense_of(tensor));
  const auto shares = sharing_memory(dense);
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (shares[i]) dense[i] = dense[i].clone();
  return dense;
}

// ----------------------------------------------------------------------------------------------------------------- allreduce

detail::GradientRule rule_of(const AllreduceOptions& options) {
  return [options](const Tensors& gradients) {
    AllreduceOptions same = options;
    if (!same.name.empty()) same.name += ".gradient";
    return grouped_allreduce(gradients, same);
  };
}

std::shared_ptr<Operation> allreduction(const Tensors& tensors, const AllreduceOptions& options, Form form) {
  constexpr std::string_view kWhat = "allreduce";
  check_group(tensors, kWhat, options.name, form);
  options.compression.refuse_memory(kWhat);
  const bool differentiable = form == Form::Fresh && needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->in_place = form == Form::InPlace;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Allreduce;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.op = options.op;
  submission.prescale_factor = options.prescale_factor;
  submission.postscale_factor = options.postscale_factor;
  submission.device = detail::device_of(tensors.front());
  const at::NoGradGuard no_gradient;
  const Tensors all_dense = form == Form::InPlace ? dense_in_place(tensors) : Tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const DataType dtype = detail::data_type_of(tensor, kWhat);
    const DataType wire = options.compression.wire_type(dtype);
    const at::Tensor dense = form == Form::InPlace ? all_dense[i] : dense_of(tensor);
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
  if (differentiable) operation->backward = rule_of(options);
  return operation;
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
  check_group(tensors, kWhat, options.name, Form::Fresh);
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
  check_group(tensors, kWhat, options.name, Form::Fresh);
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
  if (!splits.defined()) throw InvalidArgument(formatted("alltoall '{}': the splits are an undefined tensor", options.name));
  const bool whole = splits.scalar_type() == at::kInt || splits.scalar_type() == at::kLong;
  if (!whole || splits.dim() != 1)
    throw InvalidArgument(formatted("alltoall '{}': splits must be a 1-D tensor of int32 or int64", options.name));
  const at::Tensor here = splits.detach().to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

std::shared_ptr<Operation> exchanging(const at::Tensor& tensor, const AlltoallOptions& options) {
  constexpr std::string_view kWhat = "alltoall";
  check_group({tensor}, kWhat, options.name, Form::Fresh);
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

detail::GradientRule rule_of(const BroadcastOptions& options) {
  return [options](const Tensors& gradients) {
    AllreduceOptions average{.name = options.name.empty() ? "" : options.name + ".gradient", .process_set = options.process_set};
    Tensors means = grouped_allreduce(gradients, average);
    if (rank() != options.root_rank)
      for (auto& mean : means) mean.zero_();
    return means;
  };
}

std::shared_ptr<Operation> broadcasting(const Tensors& tensors, const BroadcastOptions& options, Form form) {
  constexpr std::string_view kWhat = "broadcast";
  check_group(tensors, kWhat, options.name, form);
  const bool differentiable = form == Form::Fresh && needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->in_place = form == Form::InPlace;
  Submission& submission = operation->submission;
  submission.kind = OpKind::Broadcast;
  submission.name = options.name;
  submission.process_set = options.process_set.id();
  submission.root = options.root_rank;
  submission.device = detail::device_of(tensors.front());
  const at::NoGradGuard no_gradient;
  const Tensors all_dense = form == Form::InPlace ? dense_in_place(tensors) : Tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const at::Tensor dense = form == Form::InPlace ? all_dense[i] : dense_of(tensor);
    if (form == Form::InPlace) {
      operation->add(dense, dense, kWhat);
      operation->results.push_back(dense.is_alias_of(tensor) ? dense : tensor);
    } else {
      const at::Tensor output = detail::empty_shared(tensor.sizes(), dense.options());
      operation->add(dense, output, kWhat);
      operation->results.push_back(output);
    }
  }
  if (differentiable) operation->backward = rule_of(options);
  return operation;
}

// ------------------------------------------------------------------------------------------------ forms in place and autograd

std::shared_ptr<Operation> in_place(const Tensors& tensors, const AllreduceOptions& options) {
  return allreduction(tensors, options, Form::InPlace);
}
std::shared_ptr<Operation> in_place(const Tensors& tensors, const BroadcastOptions& options) {
  return broadcasting(tensors, options, Form::InPlace);
}

/// Those of the tensors that are another function of what came before when they have been changed.
class Histories {
 public:
  /// Looks at the tensors before they are changed. Throws InvalidArgument.
  Histories(const Tensors& tensors, std::string_view what, const std::string& name) : group_(tensors.size() > 1) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (detail::changes_history(tensors[i], what, name) && is_another(tensors[i], title(what, name, tensors, i)))
        changed_.emplace_back(i, tensors[i]);
  }
  /// Once they are changed, or about to be. Each has a rule of its own: of a group, one may be a view and another need no gradient.
  template <class Options>
  void rewrite(const Options& options) const {
    for (const auto& [number, tensor] : changed_) {
      Options own = options;
      if (group_ && !own.name.empty()) own.name += formatted(".{}", number);
      detail::rewrite_history(tensor, rule_of(own));
    }
  }

 private:
  /// Whether it is none of those before it. Throws InvalidArgument if it is part of one: its gradient would be reduced twice.
  [[nodiscard]] bool is_another(const at::Tensor& tensor, const std::string& which) const {
    for (const auto& [number, other] : changed_) {
      if (tensor.is_same(other)) return false;
      if (tensor.is_alias_of(other) && at::get_overlap_status(tensor, other) != at::MemOverlapStatus::No)
        throw InvalidArgument(
            formatted("{}: in place together with tensor {}, whose memory it may share, where gradients are required; give "
                      "them one after the other",
                      which, number));
    }
    return true;
  }
  std::vector<std::pair<std::size_t, at::Tensor>> changed_;
  bool group_;
};

template <class Options>
Tensors run_in_place(std::string_view what, const Tensors& tensors, const Options& options) {
  const Histories histories(tensors, what, options.name);
  auto changed = start(in_place(tensors, options), After::Wait).wait();
  histories.rewrite(options);
  return changed;
}
template <class Options>
Handle<Tensors> start_in_place(std::string_view what, const Tensors& tensors, const Options& options) {
  const Histories histories(tensors, what, options.name);
  auto handle = start(in_place(tensors, options), After::Return);
  histories.rewrite(options);
  return handle;
}

// ------------------------------------------------------------------------------------- small operations, without an Operation

/// Whether the engine can work on the tensor as it is.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

template <class Options>
SmallCall small_call(OpKind kind, const at::Tensor& tensor, const Options& options) {
  SmallCall call;
  call.kind = kind;
  call.process_set = options.process_set.id();
  call.name = options.name;
  call.dtype = detail::data_type_of(tensor, name_of(kind), options.name);
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

bool run(SmallCall& call, const at::Tensor& output) {
  call.output = output.mutable_data_ptr();
  return engine()->try_fast_path(call);
}

bool run_in_place(SmallCall& call, const at::Tensor& tensor) {
  if (!run(call, tensor)) return false;
  detail::note_change(tensor);
  return true;
}

bool is_small(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()) <= kSmallCallBytes; }

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
  SmallCall call = small_call(kind, tensor, options);
  Rows rows{tensor, {}};
  call.allocate = &Rows::allocate;
  call.context = &rows;
  return engine()->try_fast_path(call) ? rows.result : at::Tensor();
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (may_run(tensor, options) && !needs_gradient({tensor})) {
    SmallCall call = small_call(OpKind::Allreduce, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false)); run(call, output)) return output;
  }
  return start(allreduction({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options) {
  if (may_run(tensor, options) && !detail::changes_history(tensor, "allreduce", options.name)) {
    SmallCall call = small_call(OpKind::Allreduce, tensor, options);
    if (run_in_place(call, tensor)) return tensor;
  }
  return run_in_place("allreduce", {tensor}, options).front();
}
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  return first(start(allreduction({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options) {
  return first(start_in_place("allreduce", {tensor}, options));
}

Tensors grouped_allreduce(const Tensors& tensors, const AllreduceOptions& options) {
  return start(allreduction(tensors, options, Form::Fresh), After::Wait).wait();
}
Tensors grouped_allreduce_(Tensors tensors, const AllreduceOptions& options) { return run_in_place("allreduce", tensors, options); }
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const AllreduceOptions& options) {
  return start(allreduction(tensors, options, Form::Fresh), After::Return);
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const AllreduceOptions& options) {
  return start_in_place("allreduce", tensors, options);
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
    SmallCall call = small_call(OpKind::Broadcast, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false)); run(call, output)) return output;
  }
  return start(broadcasting({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor broadcast_(at::Tensor tensor, const BroadcastOptions& options) {
  if (is_plain(tensor) && is_small(tensor) && !detail::changes_history(tensor, "broadcast", options.name)) {
    SmallCall call = small_call(OpKind::Broadcast, tensor, options);
    if (run_in_place(call, tensor)) return tensor;
  }
  return run_in_place("broadcast", {tensor}, options).front();
}
Handle<at::Tensor> broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  return first(start(broadcasting({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> broadcast_async_(at::Tensor tensor, const BroadcastOptions& options) {
  return first(start_in_place("broadcast", {tensor}, options));
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
