#include "torch_bindings/gradients/gradient_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "hvd/world.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

using torch::autograd::PostAccumulateGradHook;

struct Hook : PostAccumulateGradHook {
  Hook(const void* whose, std::function<void()> what, std::unique_ptr<PostAccumulateGradHook> there)
      : owner(whose), call(std::move(what)), below(std::move(there)) {}
  void operator()(const at::Tensor& parameter) override {
    PostAccumulateGradHook* users = below.get();
    while (const auto* const other = dynamic_cast<const Hook*>(users)) users = other->below.get();
    if (users != nullptr) (*users)(parameter);
    const WorldScope scope(world, WorldScope::kAlsoGlobal);
    call();
  }
  const World world = World::current();  // of who has made it; the thread is autograd's
  const void* owner;
  std::function<void()> call;
  std::unique_ptr<PostAccumulateGradHook> below;
};

/// Returns the place where the owner's hook is held; null if it is not there.
std::unique_ptr<PostAccumulateGradHook>* find(const at::Tensor& parameter, const void* owner) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  auto* place = &torch::autograd::impl::post_acc_grad_hooks(parameter);
  while (auto* const hook = dynamic_cast<Hook*>(place->get())) {
    if (hook->owner == owner) return place;
    place = &hook->below;
  }
  return nullptr;
}

/// Returns whether the pass that runs adds to the parameter's `.grad`.
bool is_to_be_added(const at::Tensor& parameter) {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
  return found != asked->end() && found->second.needed_;
}

bool is_called(const at::Tensor& parameter, const void* owner) {
  const auto* const top =
      dynamic_cast<const Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  return top != nullptr && top->owner == owner;
}

}  // namespace

bool gets_gradients(const at::Tensor& parameter) {
  const auto type = parameter.scalar_type();
  return parameter.requires_grad() ||
         (torch::autograd::isDifferentiableType(type) && is_carried(type));
}

void put_gradient_hooks(const at::Tensor& parameter, const void* owner,
                        std::optional<unsigned>& number, bool wants_before,
                        const std::function<GradientCalls()>& make) {
  const bool has_after = has_gradient_hook(parameter, owner),
             takes_before = wants_before && !number && parameter.requires_grad();
  if (has_after && !takes_before) return;
  GradientCalls calls = make();
  if (!has_after) {
    auto& top = torch::autograd::impl::post_acc_grad_hooks(parameter);
    top = std::make_unique<Hook>(owner, std::move(calls.after), std::move(top));
  }
  if (!takes_before) return;
  // it owns the hook
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(
      parameter.getIntrusivePtr());
  number = parameter.register_hook([weak, owner, call = std::move(calls.before),
                                    world = World::current()](const at::Tensor& /*given*/) {
    const at::Tensor of(weak.lock());
    if (!of.defined() || !is_called(of, owner) || !is_to_be_added(of)) return;
    const WorldScope scope(world, WorldScope::kAlsoGlobal);
    call();
  });
}

void remove_gradient_hooks(const at::Tensor& parameter, const void* owner,
                           std::optional<unsigned>& number) {
  if (auto* const place = find(parameter, owner)) {
    auto below = std::move(static_cast<Hook&>(**place).below);
    *place = std::move(below);
  }
  if (number) parameter.remove_hook(*std::exchange(number, {}));
}

bool has_gradient_hook(const at::Tensor& parameter, const void* owner) {
  return find(parameter, owner) != nullptr;
}

}  // namespace hvd::detail
