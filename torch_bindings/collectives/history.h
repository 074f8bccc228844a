#pragma once
/// Tells autograd of collectives: how gradients pass results that were computed elsewhere, and that
/// forms in place have changed their argument. Functions only; any thread. Refuses with
/// InvalidArgument what autograd cannot express.
// Tested in tests/torch_bindings/collectives/into_test.cc,
// tests/torch_bindings/what_if/what_if_collectives_test.cc

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/world.h"

namespace hvd::detail {

/// Computes gradients of the inputs from those of the results. Must not hold the results: they hold
/// it.
class GradientRule {
 public:
  GradientRule() = default;
  /// Makes a rule that is followed in the world that is current now, in whatever thread.
  template <class Function, class = std::enable_if_t<std::is_invocable_r_v<
                                std::vector<at::Tensor>, Function, const std::vector<at::Tensor>&>>>
  GradientRule(Function function)  // NOLINT: a function is a rule
      : world_(World::current()), function_(std::move(function)) {}
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& gradients) const {
    const WorldScope scope(world_, WorldScope::kAlsoGlobal);
    return function_(gradients);
  }
  explicit operator bool() const { return function_ != nullptr; }

 private:
  World world_;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function_;
};

/// Returns the places of the tensors of a group that can have gradients: those of floating-point
/// and complex numbers.
std::vector<std::size_t> differentiable(const std::vector<at::Tensor>& group);
/// Returns `results` as what came of `given`, with that rule for the gradients of those that can
/// have any.
std::vector<at::Tensor> tied(const std::vector<at::Tensor>& given,
                             const std::vector<at::Tensor>& results, GradientRule rule);

/// Returns whether `tensor`, when an operation changes it in place, is afterwards another function
/// of what came before: it requires a gradient, grad mode is on, and it is no leaf nor a view of
/// one. (Leaves are data: parameters are broadcast in place with grad mode on.) Throws
/// InvalidArgument for one of several views that one operation made (split, chunk, unbind), whose
/// history cannot be rewritten.
bool changes_history(const at::Tensor& tensor, std::string_view what, const std::string& name);
/// Counts as a change: backward then refuses to use `tensor` where it had saved what was in it
/// before. Nothing on inference tensors, which are never saved.
void note_change(const at::Tensor& tensor);
/// Throws InvalidArgument for one of several views that one operation made (split, chunk, unbind),
/// whose history cannot be rewritten.
void refuse_several_views(const at::Tensor& tensor, std::string_view what, const std::string& name);
/// From now on `output`, which has been written to, is a function of `input`: its gradients go by
/// `rule` there, and to nothing that it was.
void write_history(const at::Tensor& output, const at::Tensor& input, GradientRule rule);
/// From now on gradients of `tensor` go by `rule` to what it was before.
void rewrite_history(const at::Tensor& tensor, GradientRule rule);

}  // namespace hvd::detail
