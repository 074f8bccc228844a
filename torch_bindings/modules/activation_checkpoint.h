#pragma once
/// Activation checkpointing: what a part of the model computes on its way is not kept for backward
/// but computed again there (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016),
/// for a third more time. Gradients are bit for bit those without it.
///
///     x = hvd::checkpoint([this](const at::Tensor& h) { return block->forward(h); }, x);
///
/// The graph stays as it is; only the tensors that it saves are left out, and given when backward
/// asks for them. So gradients take the ordinary way: hooks of DistributedOptimizer and
/// DistributedDataParallel are called once for each parameter, however many checkpointed parts use
/// it. Parts may be nested, and backward may be called again (retain_graph), for some inputs only,
/// or to be differentiated.
///
/// Tensors belong into the inputs: what a function captures by value is kept, and what it captures
/// by reference must live until backward has ended (the local variables of a function around it do
/// not).
///
/// The function is called again, in autograd's thread, once for each backward pass that needs it,
/// and left, by an exception of no standard type, when all is there: random numbers and autocast
/// are as they were, what else it depends on it must find unchanged. What it does beside computing
/// its result it does twice, but for batch norm's running statistics, which take each batch once.
/// It refuses (InvalidArgument, out of `backward()`) a function that does not do the same again,
/// and inputs, parameters and saved tensors that have been changed in place since. What the
/// function throws when it is called again is thrown by `backward()`.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_bindings/collectives/tensor_structure.h"

#pragma GCC visibility push(default)
namespace hvd {

namespace detail {

/// While it lives, what autograd saves in this thread is left out, and computed again by `again`
/// when backward needs it.
class [[nodiscard]] CheckpointScope {
 public:
  /// Calls the function with these tensors in the place of those it had.
  using Again = std::function<void(const std::vector<at::Tensor>&)>;
  /// `may_leave`: the function lets exceptions pass.
  CheckpointScope(const std::vector<at::Tensor>& inputs, Again again, bool may_leave);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  class Taking;
  std::unique_ptr<Taking> taking_;
};

/// A type that refers to memory that it does not keep.
template <class Value>
inline constexpr bool is_view = std::is_same_v<Value, std::string_view>;
template <class Element>
inline constexpr bool is_view<c10::ArrayRef<Element>> = true;
template <class Element, std::size_t Extent>
inline constexpr bool is_view<std::span<Element, Extent>> = true;

template <class Original, class Kept>
decltype(auto) as_given(Kept& kept) {
  if constexpr (std::is_lvalue_reference_v<Original>) {
    return static_cast<Kept&>(kept);
  } else {
    return static_cast<Kept&&>(kept);
  }
}

/// Calls a function, or the forward of a module (a holder, a shared pointer).
template <class Function, class... Inputs>
decltype(auto) call_function(Function&& function, Inputs&&... inputs) {
  if constexpr (requires { function->forward(std::forward<Inputs>(inputs)...); }) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else {
    return std::invoke(std::forward<Function>(function), std::forward<Inputs>(inputs)...);
  }
}

/// Returns what calls `function` again as it was called before, with copies of what it was given.
template <class... Inputs, class Function, class Kept>
CheckpointScope::Again call_again(std::shared_ptr<Function> function, Kept inputs) {
  return [function = std::move(function),
          inputs = std::move(inputs)](const std::vector<at::Tensor>& tensors) {
    auto mine = inputs;  // the function may change them
    std::size_t next = 0;
    visit_tensors<true>(mine, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
    const auto call = [&mine](auto& callee) {
      std::apply(
          [&](auto&... kept) {
            static_cast<void>(call_function(callee, as_given<Inputs>(kept)...));
          },
          mine);
    };
    if constexpr (std::is_copy_constructible_v<Function>) {
      Function copy(*function);
      call(copy);
    } else {
      call(*function);
    }
  };
}

}  // namespace detail

/// Returns `function(inputs...)`, and keeps for backward the inputs instead of what is computed on
/// the way. The function is anything that can be called, or a module, and returns anything. Inputs
/// are tensors (with a gradient or without, also undefined), lists, maps, pairs, tuples and
/// optionals of them, or anything else that can be copied: copies are kept for the second call, as
/// one of the function is. What must not be copied goes in std::ref. Without gradients
/// (NoGradGuard) it is a plain call.
template <class Function, class... Inputs>
decltype(auto) checkpoint(Function&& function, Inputs&&... inputs) {
  static_assert((!detail::is_view<std::decay_t<Inputs>> && ...),
                "checkpoint: a view (ArrayRef, span, string_view) may refer to what has gone when "
                "backward runs: pass a vector or a string");
  static_assert((std::is_copy_constructible_v<std::decay_t<Inputs>> && ...),
                "checkpoint: inputs are kept for a second call: pass std::ref(input) of what "
                "cannot be copied");
  using Kept = std::decay_t<Function>;
  constexpr bool may_leave = !std::is_nothrow_invocable_v<Function, Inputs...>;
  if (!at::GradMode::is_enabled())
    return detail::call_function(std::forward<Function>(function), std::forward<Inputs>(inputs)...);
  std::tuple<std::decay_t<Inputs>...> kept(inputs...);
  std::vector<at::Tensor> tensors;
  detail::visit_tensors<true>(
      kept, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
  if constexpr (std::is_copy_constructible_v<Kept>) {
    const detail::CheckpointScope scope(
        tensors, detail::call_again<Inputs...>(std::make_shared<Kept>(function), std::move(kept)),
        may_leave);
    tensors.clear();
    return detail::call_function(std::forward<Function>(function), std::forward<Inputs>(inputs)...);
  } else {
    const auto only = std::make_shared<Kept>(std::forward<Function>(function));
    const detail::CheckpointScope scope(
        tensors, detail::call_again<Inputs...>(only, std::move(kept)), may_leave);
    tensors.clear();
    return detail::call_function(*only, std::forward<Inputs>(inputs)...);
  }
}

}  // namespace hvd
#pragma GCC visibility pop
