#include "torch_bindings/collectives/history.h"

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/torch.h>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd::detail {

namespace {

using Tensors = std::vector<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Rule : torch::CustomClassHolder {
  explicit Rule(GradientRule rule) : backward(std::move(rule)) {}
  GradientRule backward;
};

/// `results` null: the inputs themselves, which have been changed.
class Communicated : public torch::autograd::Function<Communicated> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList given,
                               const Tensors* results, GradientRule* rule) {
    context->saved_data["rule"] =
        c10::IValue::make_capsule(c10::make_intrusive<Rule>(std::move(*rule)));
    if (results != nullptr) return *results;
    context->mark_dirty(given.vec());
    return given.vec();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto rule = context->saved_data["rule"].toCapsule();
    const auto places = differentiable(gradients);
    variable_list given;
    for (const auto place : places) given.push_back(gradients[place]);
    const auto found = static_cast<const Rule*>(rule.get())->backward(given);
    variable_list result(gradients.size() + 2);  // none for the other arguments
    for (std::size_t i = 0; i < places.size(); ++i) result[places[i]] = found[i];
    return result;
  }
};

/// The node of an input and of an output that takes what has come of it.
class Written : public torch::autograd::Function<Written> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList both, GradientRule* rule) {
    context->saved_data["rule"] =
        c10::IValue::make_capsule(c10::make_intrusive<Rule>(std::move(*rule)));
    context->mark_dirty({both[1]});
    return {both[1]};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list result(3);  // none for the output as it was, nor for the rule
    if (!context->needs_input_grad(0)) return result;
    const auto rule = context->saved_data["rule"].toCapsule();
    result[0] = static_cast<const Rule*>(rule.get())->backward(gradients).front();
    return result;
  }
};

}  // namespace

std::vector<std::size_t> differentiable(const Tensors& group) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < group.size(); ++i)
    if (torch::autograd::isDifferentiableType(group[i].scalar_type())) places.push_back(i);
  return places;
}

Tensors tied(const Tensors& given, const Tensors& results, GradientRule rule) {
  // a TensorList: autograd would not look into a vector
  return Communicated::apply(at::TensorList(given), &results, &rule);
}

bool changes_history(const at::Tensor& tensor, std::string_view what, const std::string& name) {
  if (!tensor.defined() || !at::GradMode::is_enabled() || !tensor.requires_grad()) return false;
  if (tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf())) return false;
  refuse_several_views(tensor, what, name);
  return true;
}

void refuse_several_views(const at::Tensor& tensor, std::string_view what,
                          const std::string& name) {
  using torch::autograd::can_mutate_inplace_result;
  if (torch::autograd::can_mutate_inplace(tensor, true) == can_mutate_inplace_result::success)
    return;
  require_running();
  throw InvalidArgument(
      formatted("{} '{}': in place on one of several views that one operation made (as split, "
                "chunk and unbind do), of a tensor that requires a gradient; clone it first, or "
                "use the form that returns a new tensor",
                what, name));
}

void note_change(const at::Tensor& tensor) {
  if (!tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
}

void rewrite_history(const at::Tensor& tensor, GradientRule rule) {
  const Tensors changed{tensor};
  const Tensors* const none = nullptr;
  Communicated::apply(at::TensorList(changed), none, &rule);
}

void write_history(const at::Tensor& output, const at::Tensor& input, GradientRule rule) {
  const Tensors both{input, output};
  Written::apply(at::TensorList(both), &rule);
}

}  // namespace hvd::detail
