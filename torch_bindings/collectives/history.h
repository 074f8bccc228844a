#pragma once
/// Tells autograd of collectives: how gradients pass results that were computed elsewhere, and that forms in place have changed their
/// argument. Functions only; any thread. Refuses with InvalidArgument what autograd cannot express.
// Tested in tests/torch_bindings/collectives/into_test.cc, tests/torch_bindings/what_if/what_if_collectives_test.cc

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::detail {

/// Computes gradients of the inputs from those of the results. Must not hold the results: they hold it.
using GradientRule = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Returns `results` as what came of `given`, with that rule for their gradients.
std::vector<at::Tensor> tied(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& results, GradientRule rule);

/// Returns whether `tensor`, when an operation changes it in place, is afterwards another function of what came before: it requires a
/// gradient, grad mode is on, and it is no leaf nor a view of one. (Leaves are data: parameters are broadcast in place with grad mode on.)
/// Throws InvalidArgument for one of several views that one operation made (split, chunk, unbind), whose history cannot be rewritten.
bool changes_history(const at::Tensor& tensor, std::string_view what, const std::string& name);
/// Counts as a change: backward then refuses to use `tensor` where it had saved what was in it before. Nothing on inference tensors, which
/// are never saved.
void note_change(const at::Tensor& tensor);
/// Throws InvalidArgument for one of several views that one operation made (split, chunk, unbind), whose history cannot be rewritten.
void refuse_several_views(const at::Tensor& tensor, std::string_view what, const std::string& name);
/// From now on `output`, which has been written to, is a function of `input`: its gradients go by `rule` there, and to nothing that it was.
void write_history(const at::Tensor& output, const at::Tensor& input, GradientRule rule);
/// From now on gradients of `tensor` go by `rule` to what it was before.
void rewrite_history(const at::Tensor& tensor, GradientRule rule);

}  // namespace hvd::detail
