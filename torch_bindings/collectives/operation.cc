#include "torch_bindings/collectives/operation.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/accumulate.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd::detail {

namespace {
using Tensors = std::vector<at::Tensor>;
}

void Operation::add(const at::Tensor& to_send, const at::Tensor& to_receive,
                    std::string_view what) {
  submission.tensors.push_back(argument(to_send, to_receive, what));
  sent.push_back(to_send);
  received.push_back(to_receive);
}

std::string title(std::string_view what, const std::string& name, const Tensors& group,
                  std::size_t index) {
  std::string text =
      name.empty() ? std::string(what) : formatted("{} '{}'", what, display_name(name));
  if (group.size() > 1)
    text += formatted(", tensor {} of the group (0 to {})", index, group.size() - 1);
  return text;
}

std::string gradient_name(const std::string& name, const Tensors& gradients, bool rows_differ) {
  if (!name.empty() && !is_unnamed(name)) return name + ".gradient";
  std::int64_t elements = 0;
  for (const auto& gradient : gradients)
    elements += rows_differ && gradient.dim() > 0
                    ? c10::multiply_integers(gradient.sizes().slice(1))
                    : gradient.numel();
  return library_name(
      formatted("gradients of {} elements{}", elements, rows_differ ? " a row" : ""));
}

void check_group(const Tensors& tensors, std::string_view what, const std::string& name,
                 Form form) {
  require_running();
  if (tensors.empty())
    throw InvalidArgument(
        formatted("{}: an empty group of tensors", title(what, name, tensors, 0)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const auto refuse = [&](const std::string& why) {
      throw InvalidArgument(title(what, name, tensors, i) + ": " + why);
    };
    if (!tensor.defined())
      refuse(
          "an undefined tensor; a rank that has nothing to give gives zeros, or no rows where rows "
          "are gathered");
    if (tensor.layout() != at::kStrided)
      refuse(formatted("a tensor of layout {}; make it dense first", c10::str(tensor.layout())));
    if (!is_carried(tensor.scalar_type()))
      refuse(formatted("tensors of type {} are not supported", at::toString(tensor.scalar_type())));
    if (!tensor.is_cpu() && !tensor.is_cuda())
      refuse(formatted("tensors on {} are not supported", tensor.device().str()));
    if (form == Form::InPlace && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      refuse(
          "in place on a tensor whose elements share memory (as after expand()); clone it first");
    if (tensor.device() != tensors.front().device())
      refuse(formatted("the tensors of a group must be on one device, not on {} and {}",
                       tensors.front().device().str(), tensor.device().str()));
  }
}

at::Tensor dense_of(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

bool needs_gradient(const Tensors& tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return tensor.requires_grad(); });
}

namespace {

/// Returns what `wait()` returns.
Tensors finish(const std::shared_ptr<Operation>& operation, const HandleState& pending) {
  *operation->rows = pending.rows;
  if (!operation->lack.empty()) throw BackendError(operation->lack);
  if (operation->point) {
    Tensors used = operation->received;
    for (std::size_t i = 0; i < operation->results.size(); ++i)
      if (!operation->results[i].is_same(used[i])) used.push_back(operation->results[i]);
    operation->point->hand_over(used, pending.completions);
  }
  if (operation->decode) {
    operation->received = operation->decode(*operation);
    operation->results = operation->in_place ? operation->given : operation->received;
    operation->decode = nullptr;  // also if what follows throws, and is tried again
  }
  for (std::size_t i = 0; i < operation->results.size(); ++i) {
    if (!operation->received[i].defined()) continue;
    if (!operation->results[i].is_same(operation->received[i])) {
      const c10::InferenceMode as_it_was_made(operation->results[i].is_inference());
      const at::NoGradGuard no_gradient;
      operation->results[i].copy_(operation->received[i]);
      operation->received[i] = operation->results[i];
    }
  }
  if (operation->in_place) {
    // backward may have been shown it meanwhile
    for (const auto& tensor : operation->given) note_change(tensor);
    return operation->given;
  }
  return operation->backward ? tied(operation->given, operation->results, operation->backward)
                             : operation->results;
}

}  // namespace

Handle<Tensors> start(const std::shared_ptr<Operation>& operation, After after) {
  auto running = engine();
  operation->submission.keep_alive = operation;
  const std::string& name = operation->submission.name;
  operation->point =
      stream_point(operation->sent.front(),
                   title(name_of(operation->submission.kind), name, operation->given, 0));
  if (operation->point)
    for (auto& tensor : operation->submission.tensors)
      tensor.ready_event = operation->point->event();
  Submission submission = std::move(operation->submission);
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  auto pending = running->submit(std::move(submission), after);
  if (operation->in_place)
    for (const auto& tensor : operation->given) note_change(tensor);  // from now on
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

Handle<at::Tensor> first(const Handle<Tensors>& handle) {
  return handle.map<at::Tensor>([](const Tensors& tensors) { return tensors.front(); });
}

namespace {

/// A rank whose GPU is full takes part all the same, as the others have agreed and need it: its
/// results go to the host, and are not given to the user.
at::Tensor allocate_result(Operation& operation, const std::string& name, std::size_t index,
                           at::IntArrayRef sizes, ResultPool* pool) {
  const auto options = operation.sent[index].options();
  const auto make = [&] { return empty_result(sizes, options, pool); };
  if (!operation.point) return make();
  try {
    return operation.point->allocate(make);
  } catch (const c10::OutOfMemoryError& error) {
    const auto what = title(name_of(operation.submission.kind), name, operation.given, index);
    operation.lack = formatted("{}: no memory for the result of {} on this rank: {}", what,
                               to_string(Shape(sizes.vec())), error.what_without_backtrace());
    return operation.point->allocate_on_host(sizes, options);
  }
}

}  // namespace

void allocate_rows(const std::shared_ptr<Operation>& operation) {
  operation->results.resize(operation->given.size());
  operation->submission.allocate = [held = std::weak_ptr<Operation>(operation),
                                    name = operation->submission.name, pool = result_pool()](
                                       std::size_t index, std::int64_t rows) -> void* {
    const auto made = held.lock();
    auto sizes = made->sent[index].sizes().vec();
    sizes.front() = rows;
    made->results[index] = made->received[index] =
        allocate_result(*made, name, index, sizes, pool.get());
    return made->results[index].mutable_data_ptr();
  };
}

}  // namespace hvd::detail
