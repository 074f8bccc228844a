#pragma once
/// Collectives whose results have the shapes of their arguments, and their forms that change these:
/// how a group of tensors that may share memory is read and written, and what autograd is told. Any
/// thread. Errors: InvalidArgument for what autograd cannot express.
// Tested in tests/torch_bindings/collectives/operation_test.cc,
// tests/torch_bindings/what_if/what_if_collectives_test.cc

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/operation.h"

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
  compression.refuse_memory(name_of(kind));
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

}  // namespace hvd::detail
