#include "torch_bindings/gradients/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "hvd/world.h"

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

}  // namespace

void add_gradient_hook(const at::Tensor& parameter, const void* owner, std::function<void()> call) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  auto& top = torch::autograd::impl::post_acc_grad_hooks(parameter);
  top = std::make_unique<Hook>(owner, std::move(call), std::move(top));
}

void remove_gradient_hook(const at::Tensor& parameter, const void* owner) {
  auto* const place = find(parameter, owner);
  if (place == nullptr) return;
  auto below = std::move(static_cast<Hook&>(**place).below);
  *place = std::move(below);
}

bool has_gradient_hook(const at::Tensor& parameter, const void* owner) {
  return find(parameter, owner) != nullptr;
}

}  // namespace hvd::detail
