#pragma once
/// Collectives that write where the caller says: in place, in tensors that may share memory, and
/// `allgather_into`, `alltoall_into` and `reducescatter_into`; and what autograd is told. Any
/// thread. Errors: InvalidArgument at the call, for what autograd cannot express, and for an output
/// that cannot fit, that has elements which share memory, or that autograd would have refused as
/// the output of an operation in place.
// Tested in tests/torch_bindings/collectives/operation_test.cc,
// tests/torch_bindings/collectives/into_test.cc,
// tests/torch_bindings/what_if/what_if_collectives_test.cc

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/history.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"

namespace hvd::detail {

/// Returns the tensors as an operation in place reads and writes them; those that it cannot are
/// copied, and written when it is done.
std::vector<at::Tensor> dense_in_place(const std::vector<at::Tensor>& tensors);

/// Adds the tensors that the operation was given, and results of their shapes: the tensors
/// themselves, or new ones. What `compression` packs travels from a copy.
void add_given(Operation& operation, const Compression& compression);
/// Returns an operation whose results have the shapes of its tensors, in either form: allreduce,
/// broadcast. `rule`: makes the one for its gradients.
template <class Options>
std::shared_ptr<Operation> operation_of_same_shapes(OpKind kind,
                                                    const std::vector<at::Tensor>& tensors,
                                                    const Options& options, Form form,
                                                    const Compression& compression,
                                                    GradientRule (*rule)(const Options&)) {
  check_group(tensors, name_of(kind), options.name, form);
  const bool is_differentiable = form == Form::Fresh && needs_gradient(tensors);
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->in_place = form == Form::InPlace;
  operation->submission = request(kind, options, detail::device_of(tensors.front()));
  add_given(*operation, compression);
  if (is_differentiable) operation->backward = rule(options);
  return operation;
}

/// The tensors of a group that are another function of what came before once they are changed.
class Histories {
 public:
  /// Looks at the tensors before they are changed. Throws InvalidArgument.
  Histories(const std::vector<at::Tensor>& tensors, std::string_view what, const std::string& name);
  /// Once they are changed, or about to be. Each has a rule of its own: of a group, one may be a
  /// view and another need no gradient.
  template <class Options>
  void rewrite(const Options& options, GradientRule (*rule)(const Options&)) const {
    for (const auto& [number, tensor] : changed_) {
      Options own = options;
      if (group_ && !own.name.empty()) own.name += formatted(".{}", number);
      rewrite_history(tensor, rule(own));
    }
  }

 private:
  /// Returns whether it is none of those before it. Throws InvalidArgument if it is part of one:
  /// its gradient would be reduced twice.
  [[nodiscard]] bool is_another(const at::Tensor& tensor, const std::string& which) const;
  std::vector<std::pair<std::size_t, at::Tensor>> changed_;
  bool group_;
};

/// Both forms take the functions that make the operation and its rule for gradients.
template <class Options>
std::vector<at::Tensor> run_in_place(
    std::string_view what, const std::vector<at::Tensor>& tensors, const Options& options,
    std::shared_ptr<Operation> (*make)(const std::vector<at::Tensor>&, const Options&, Form),
    GradientRule (*rule)(const Options&)) {
  const Histories histories(tensors, what, options.name);
  auto changed = start(make(tensors, options, Form::InPlace), After::Wait).wait();
  histories.rewrite(options, rule);
  return changed;
}
template <class Options>
Handle<std::vector<at::Tensor>> start_in_place(
    std::string_view what, const std::vector<at::Tensor>& tensors, const Options& options,
    std::shared_ptr<Operation> (*make)(const std::vector<at::Tensor>&, const Options&, Form),
    GradientRule (*rule)(const Options&)) {
  const Histories histories(tensors, what, options.name);
  auto handle = start(make(tensors, options, Form::InPlace), After::Return);
  histories.rewrite(options, rule);
  return handle;
}

/// The tensor that a result goes to; it knows whether gradients follow.
class Target {
 public:
  /// Throws InvalidArgument for an undefined tensor, and for leaves that require a gradient where
  /// grad mode is on.
  Target(at::Tensor output, const at::Tensor& input, OpKind kind, const std::string& name);
  [[nodiscard]] const at::Tensor& output() const { return output_; }
  /// Returns the operation that reads `input` and writes the output. `splits`: of an alltoall, or
  /// the elements for each rank of a reducescatter.
  template <class Options>
  [[nodiscard]] std::shared_ptr<Operation> operation(
      const Options& options, const std::vector<std::int64_t>& splits = {}) const {
    return operation(request(kind_, options, detail::device_of(input_)), options.process_set,
                     splits);
  }
  /// Starts the operation; from then on gradients of the output go by `rule` to the input, where
  /// grad mode is on and one is required.
  [[nodiscard]] Handle<std::vector<at::Tensor>> start(const std::shared_ptr<Operation>& operation,
                                                      After after, GradientRule rule) const;

  /// Returns whether it has been done as a small repeated operation.
  template <class Options>
  [[nodiscard]] bool run_small(const Options& options) const {
    if (connects_ || !fits_small_calls()) return false;
    SmallCall call = small_call(kind_, input_, options);
    call.output_rows = output_.size(0);
    return run_small_in_place(call, output_);
  }

 private:
  [[nodiscard]] std::shared_ptr<Operation> operation(Submission submission, const ProcessSet& set,
                                                     const std::vector<std::int64_t>& splits) const;
  [[nodiscard]] bool fits_small_calls() const;
  at::Tensor output_, input_;
  OpKind kind_;
  std::string name_;
  bool connects_;  ///< gradients follow
};

/// Returns the rows for each rank of an alltoall of `tensor`, as the options give them or evenly.
/// Throws InvalidArgument. Blocks where the splits are on a device.
std::vector<std::int64_t> splits_of(const at::Tensor& tensor, const AlltoallOptions& options);
/// Returns the device of the options' splits: the CPU where there are none.
at::Device device_of_splits(const AlltoallOptions& options);
/// Returns the rows that have come from each rank, as int32, or int64 where there are too many.
at::Tensor received_splits(const std::vector<std::int64_t>& rows, at::Device device);
/// Returns `dense` as the core sees it. Throws InvalidArgument, which begins with `what`, for a
/// type that is not carried.
Buffer buffer_of(const at::Tensor& dense, const std::string& what);

}  // namespace hvd::detail
