// What a GradientReducer learns of gradients from backward, as it gives them.
// Tested in tests/torch_bindings/reducer/reducer_test.cc,
// tests/torch_bindings/what_if/what_if_gradients_test.cc
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <utility>

#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/gradients/gradient_hooks.h"
#include "torch_bindings/reducer/reducer.h"
#include "torch_bindings/reducer/step_watch.h"

namespace hvd {

void GradientReducer::hook(Observers observers) {
  observers_ = std::move(observers);
  hooked_ = true;
  for (std::size_t i = 0; i < buckets_.slots().size(); ++i) put_hook(i);
}

/// Puts on what is not there.
void GradientReducer::put_hook(std::size_t index) {
  GradientSlot& slot = buckets_.slots()[index];
  // where there is one rank, and who wants to know, it would have nothing to do
  const bool wants_before = !observers_.wants || buckets_.summed_ranks() > 1;
  detail::put_gradient_hooks(slot.named.parameter, this, slot.before_hook, wants_before, [&] {
    detail::GradientCalls calls;
    calls.after = [weak = weak_from_this(), index] {
      if (const auto self = weak.lock()) self->on_gradient(index);
    };
    calls.before = [weak = weak_from_this(), index] {
      if (const auto self = weak.lock()) self->before_gradient(index);
    };
    return calls;
  });
}

void GradientReducer::hook_again() {
  const auto& slots = buckets_.slots();
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (hooked_ && !detail::has_gradient_hook(slots[i].named.parameter, this)) put_hook(i);
}

void GradientReducer::unhook() {
  hooked_ = false;
  owner_.end();
  for (auto& slot : buckets_.slots())
    detail::remove_gradient_hooks(slot.named.parameter, this, slot.before_hook);
}

void GradientReducer::listen(bool on) {
  const std::lock_guard lock(mutex_);
  listening_ = on;
}

/// In a backward pass: the other ranks may go on.
void GradientReducer::refuse(const std::string& text) {
  static_cast<void>(has_joined());  // the pass that they wait for comes after it
  buckets_.interrupt();
  throw InvalidArgument(text);
}

void GradientReducer::on_gradient(std::size_t index) {
  if (is_forked_from_rank()) throw NotInitialized(describe_fork());  // its memory is the rank's
  GradientSlot& slot = buckets_.slots()[index];
  const std::string& name = slot.named.name;
  const bool wanted = !observers_.wants || observers_.wants(slot.named);
  const std::lock_guard lock(mutex_);
  if (!listening_) return;
  if (!wanted) {
    if (!buckets_.round_of(slot).is_given(slot.member)) return;
    refuse(
        formatted("gradient of '{}': another backward pass within the one that is being reduced (a "
                  "checkpointed part, say) has added to it after it had left; use the parameter in "
                  "one of them only, or make the pass under no_sync()",
                  name));
  }
  if (!slot.gradient().defined()) return;
  if (observers_.witness &&
      observers_.witness->on_gradient(slot.named.parameter, slot.is_replaced()))
    refuse(detail::StepWatch::words_of(name));
  if (slot.gradient().requires_grad())
    refuse(
        formatted("gradient of '{}': backward(create_graph = true) gave a gradient that can be "
                  "differentiated itself, which a reduction would lose; take such gradients by "
                  "torch::autograd::grad, and call backward() without create_graph on the loss "
                  "that they are part of",
                  name));
  const at::NoGradGuard no_gradient;
  refuse_with_shares(slot);
  begin_pass(slot);
  const bool has_left = !slot.compressed && buckets_.round_of(slot).is_given(slot.member);
  if (slot.passes > 0 && !has_left && slot.is_replaced() && !slot.sparse_dims) slot.passes = 0;
  refuse_more(slot);
  synchronized_ = false;
  ++slot.passes;
  if (const int ranks = buckets_.summed_ranks(); std::exchange(slot.reduced, false) && ranks > 1) {
    if (!slot.before_hook)
      refuse(
          formatted("gradient of '{}': it was added to one that is a sum over the ranks already; "
                    "call the optimizer's zero_grad() first",
                    name));
    // this rank's part of the sum
    if (slot.before.defined()) slot.gradient().sub_(slot.before, (ranks - 1.0) / ranks);
  }
  slot.before.reset();
  buckets_.give(slot, slot.passes == passes_per_step_);
  slot.set_mark();
}

/// Refuses a pass too many before it is added to what the others have given, which may be on its
/// way, and still counts. What a user has made of that is for `on_gradient` to judge, unless
/// nothing can be added to what is there. And remembers what a round gave before more is added to
/// it: with Sum it must not be summed again.
void GradientReducer::before_gradient(std::size_t index) {
  using Since = detail::GradientMark::Since;
  if (is_forked_from_rank()) return;
  const std::lock_guard lock(mutex_);
  GradientSlot& slot = buckets_.slots()[index];
  if (!listening_) return;
  const auto since = slot.since_mark();
  if (!observers_.wants) {  // who chooses among gradients asks for each once
    refuse_with_shares(slot);
    const bool stands_in =
        buckets_.keeps_shares() && buckets_.round_of(slot).state() == RoundState::PutAway;
    if (since == Since::Same || (since == Since::Changed && stands_in)) refuse_more(slot);
  }
  if (buckets_.summed_ranks() == 1 || !slot.reduced) return;
  slot.before = since == Since::Same || since == Since::Changed ? slot.gradient().detach().clone()
                                                                : at::Tensor();
}

/// Refuses a gradient of which the step has all passes: it left, perhaps before their number rose.
void GradientReducer::refuse_more(const GradientSlot& slot) {
  const GradientRound& round = buckets_.round_of(slot);
  if (slot.passes < passes_per_step_ && !(round.is_submitted() && round.is_given(slot.member)))
    return;
  const std::string stepped =
      observers_.witness ? observers_.witness->stepped(parameters()) : std::string();
  if (!stepped.empty()) refuse(detail::StepWatch::words_of(stepped));
  refuse(formatted(
      "gradient of '{}': more than {} backward passes without step(); raise "
      "backward_passes_per_step or call step(), synchronize() or the optimizer's zero_grad() in "
      "between (the module's is recognised only where it drops all gradients of the optimizer)",
      slot.named.name, slot.passes));
}

/// Begins a backward pass at its first gradient, which tells whether it starts anew what an earlier
/// pass gave.
void GradientReducer::begin_pass(const GradientSlot& first) {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass != std::exchange(last_pass_, pass)) {
    const bool joined = has_joined();
    if (buckets_.fate_of_gradients(&first).first == ReducerBuckets::Fate::ThrownAway)
      buckets_.throw_away(joined);
  }
  buckets_.begin_round();
}

/// A gradient that comes when those before it are kept already: it would be added to what nobody
/// may have wanted any more.
void GradientReducer::refuse_with_shares(const GradientSlot& slot) {
  if (!buckets_.keeps_shares()) return;
  if (shares_kept_)
    refuse(
        formatted("gradient of '{}': with shard_gradients the gradients of the last backward pass "
                  "are reduced and in shares already; call step() or the optimizer's zero_grad() "
                  "before the next one (backward_passes_per_step adds up several)",
                  slot.named.name));
  if (slot.gradient().is_sparse() && !options_.sparse_as_dense)
    refuse(
        formatted("gradient of '{}': it is sparse, and shard_gradients has shares of dense ones "
                  "only; set sparse_as_dense, or shard_optimizer_state instead",
                  slot.named.name));
}

}  // namespace hvd
