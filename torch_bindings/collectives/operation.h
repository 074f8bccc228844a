#pragma once
/// The common part of the collectives on at::Tensor (allreduce.cc, allgather.cc...): one submission
/// of a group of tensors, from the check of what the user gives to what `wait()` returns. Any
/// thread. Errors: InvalidArgument, naming the tensor, from `check_group`; what Engine::submit and
/// Engine::wait throw. An Operation is held by its submission and by its handles.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/api/request.h"
#include "hvd/engine/engine.h"
#include "hvd/hvd.h"
#include "torch_bindings/collectives/history.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/platform/device.h"

namespace hvd::detail {

/// The two forms of an operation: results are new tensors, or the tensors that were given.
enum class Form { Fresh, InPlace };

/// An operation on a group of tensors: holds all of them until it is done, and knows how its
/// results become what the user gets.
struct Operation {
  using Tensors = std::vector<at::Tensor>;
  Submission submission;
  Tensors given;          ///< as the user gave them
  Tensors sent;           ///< dense, in the wire's type
  Tensors received;       ///< dense, in the wire's type; `sent` where the operation is in place
  Tensors results;        ///< what the user gets
  GradientRule backward;  ///< gradients of the given tensors from those of the results
  bool in_place = false;  ///< `given` are changed
  std::shared_ptr<StreamPoint> point;  ///< of tensors on a GPU, once it is submitted
  std::string lack;  ///< why the results are on the host, for lack of memory; thrown by `wait()`
  using Rows = std::vector<std::vector<std::int64_t>>;
  std::shared_ptr<Rows> rows = std::make_shared<Rows>();  ///< as in HandleState, once it is done
  /// Makes of what was received what becomes of each given tensor; empty where that is the same.
  std::function<Tensors(const Operation&)> decode;

  void add(const at::Tensor& to_send, const at::Tensor& to_receive, std::string_view what);
};

/// Returns "allreduce 'loss'", and of a group of several also which of them.
std::string title(std::string_view what, const std::string& name,
                  const std::vector<at::Tensor>& group, std::size_t index);
/// Returns the name under which gradients of the operation of this name travel: one of the
/// library's own if that has none of the user's, as backward may run in a thread of autograd's.
/// `rows_differ`: between the ranks.
std::string gradient_name(const std::string& name, const std::vector<at::Tensor>& gradients,
                          bool rows_differ = false);
/// Throws InvalidArgument for what no collective can take.
void check_group(const std::vector<at::Tensor>& tensors, std::string_view what,
                 const std::string& name, Form form);
/// Returns the tensor's values as they are read: contiguous, neither lazily conjugated nor negated.
/// The tensor itself where it is so already.
at::Tensor dense_of(const at::Tensor& tensor);
/// Returns whether autograd wants a gradient of any of them. Call it where the user's grad mode
/// still holds.
bool needs_gradient(const std::vector<at::Tensor>& tensors);
/// Has results made when their number of rows is known.
void allocate_rows(const std::shared_ptr<Operation>& operation);
/// Returns an operation whose results' numbers of rows all ranks say together: allgather, alltoall,
/// reducescatter. It has no rule for gradients yet.
template <class Options>
std::shared_ptr<Operation> operation_by_rows(OpKind kind, const std::vector<at::Tensor>& tensors,
                                             const Options& options) {
  check_group(tensors, name_of(kind), options.name, Form::Fresh);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->submission = request(kind, options, detail::device_of(tensors.front()));
  for (const auto& tensor : tensors) operation->add(dense_of(tensor), {}, name_of(kind));
  allocate_rows(operation);
  return operation;
}

Handle<std::vector<at::Tensor>> start(const std::shared_ptr<Operation>& operation, After after);
/// Returns the handle of a group of one.
Handle<at::Tensor> first(const Handle<std::vector<at::Tensor>>& handle);

}  // namespace hvd::detail
