// What a GradientReducer learns of gradients: from backward, as it gives them, and from what has become of those that are on their way.
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/gradient_hooks.h"
#include "torch_bindings/reducer.h"
#include "torch_bindings/step_watch.h"

namespace hvd {

namespace {

bool is_zero(const at::Tensor& gradient) { return gradient.layout() == at::kStrided && !gradient.any().item<bool>(); }

}  // namespace

void GradientReducer::hook() {
  hooked_ = true;
  for (std::size_t i = 0; i < slots_.size(); ++i) put_hook(i);
}

void GradientReducer::put_hook(std::size_t slot) {
  detail::add_gradient_hook(slots_[slot].named.parameter, this, [weak = weak_from_this(), slot] {
    if (const auto self = weak.lock()) self->on_gradient(slot);
  });
}

void GradientReducer::hook_again() {
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (hooked_ && !detail::has_gradient_hook(slots_[i].named.parameter, this)) put_hook(i);
}

bool GradientReducer::requires_gradients() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.named.parameter.requires_grad(); });
}

void GradientReducer::unhook() {
  hooked_ = false;
  owner_.end();
  for (auto& slot : slots_) {
    detail::remove_gradient_hook(slot.named.parameter, this);
    if (slot.before_hook) slot.named.parameter.remove_hook(*std::exchange(slot.before_hook, {}));
  }
}

void GradientReducer::listen(bool on) {
  const std::lock_guard lock(mutex_);
  listening_ = on;
}

/// In a backward pass: the other ranks may go on, so this one takes part in the round before it forgets it.
void GradientReducer::refuse(const std::string& text) {
  interrupted_ = true;
  throw InvalidArgument(text);
}

void GradientReducer::on_gradient(std::size_t index) {
  if (is_forked_from_rank()) throw NotInitialized(describe_fork());  // its memory is the rank's
  const bool wanted = !wanted_ || wanted_(slots_[index].named);
  const std::lock_guard lock(mutex_);
  if (!listening_) return;
  Slot& slot = slots_[index];
  if (!wanted) {
    if (!round_of(slot).is_given(slot.member)) return;
    refuse(
        formatted("gradient of '{}': another backward pass within the one that is being reduced (a checkpointed part, say) has added to "
                  "it after it had left; use the parameter in one of them only, or make the pass under no_sync()",
                  slot.named.name));
  }
  const at::Tensor& gradient = slot.named.parameter.grad();
  if (!gradient.defined()) return;
  const bool anew = slot.mark.since(gradient) == detail::GradientMark::Since::Replaced;
  if (witness_ && witness_->on_gradient(slot.named.parameter, anew)) refuse(detail::StepWatch::words_of(slot.named.name));
  if (gradient.requires_grad())
    refuse(
        formatted("gradient of '{}': backward(create_graph = true) gave a gradient that can be differentiated itself, which a reduction "
                  "would lose; take such gradients by torch::autograd::grad, and call backward() without create_graph on the loss that "
                  "they are part of",
                  slot.named.name));
  const at::NoGradGuard no_gradient;
  refuse_with_shares(slot);
  begin_pass(slot);
  const auto since = slot.mark.since(gradient);
  if (slot.passes > 0 && !round_of(slot).is_given(slot.member) && since == detail::GradientMark::Since::Replaced && !slot.sparse)
    slot.passes = 0;
  if (slot.passes >= passes_per_step_)
    refuse(
        formatted("gradient of '{}': more than {} backward passes without step(); raise backward_passes_per_step or call "
                  "step(), synchronize() or the optimizer's zero_grad() in between (the module's is recognised only where it drops all "
                  "gradients of the optimizer)",
                  slot.named.name, passes_per_step_));
  synchronized_ = false;
  ++slot.passes;
  if (std::exchange(slot.reduced, false) && sums()) {
    if (!slot.before_hook)
      refuse(
          formatted("gradient of '{}': it was added to one that is a sum over the ranks already; call the "
                    "optimizer's zero_grad() first",
                    slot.named.name));
    const double ranks = options_.process_set.size();
    if (slot.before.defined()) slot.named.parameter.mutable_grad().sub_(slot.before, (ranks - 1) / ranks);  // this rank's part of the sum
  }
  slot.before.reset();
  count(slot);
  slot.mark.set(slot.named.parameter.grad());
}

/// The gradient is there: takes it in, and submits its bucket if it was the last one.
void GradientReducer::count(Slot& slot) {
  if (slot.compressed) {
    if (slot.passes == passes_per_step_) return compressed_.give(slot.member);
    return compressed_.find(slot.member, false);
  }
  Bucket& bucket = buckets_[slot.bucket];
  GradientRound& round = bucket.round;
  if (round.is_submitted() && !round.is_given(slot.member))
    return round.come_late(slot.member, !slot.sparse && !slot.named.parameter.grad().is_sparse());
  open(bucket);
  arrivals_.note(static_cast<std::size_t>(&slot - slots_.data()));
  bucket.streams.note(slot.named.parameter);
  take_in(slot, true);
  if (slot.passes < passes_per_step_) return;
  pack(slot);
  round.give(slot.member);
  if (round.state() == RoundState::Gathering) {
    std::vector<bool> are_awaited;
    for (const auto index : bucket.slots) {
      const at::Tensor& parameter = slots_[index].named.parameter;
      const at::Tensor& left = parameter.grad();
      are_awaited.push_back(parameter.requires_grad() || (left.defined() && (!left.is_cpu() || !is_zero(left))));
    }
    round.count(are_awaited);
  }
  // Nobody waits in backward: another rank may wait there for what this one gives later. What is left a later hook submits, or
  // synchronize().
  if (!round.is_complete() || !weights_.is_known()) return;
  for (auto& complete : buckets_) {
    if (!complete.round.is_complete()) continue;
    take_rest(complete, Round::Kept, true);
    submit(complete, Round::Kept, false);
  }
  put_away_what_is_done();
  for (auto& done : buckets_)  // memory of the gradients that have been copied is for others
    if (done.round.is_reduced() && done.memory.is_taken_together()) done.memory.let_go_of_given();
}

/// With Sum: what a round gave must not be summed again with what is added to it now.
void GradientReducer::before_gradient(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!listening_ || !slot.reduced) return;
  const at::Tensor& gradient = slot.named.parameter.grad();
  const auto since = slot.mark.since(gradient);
  const bool there = since == detail::GradientMark::Since::Same || since == detail::GradientMark::Since::Changed;
  slot.before = there ? gradient.detach().clone() : at::Tensor();
}

/// At the first gradient of a backward pass: whether it starts anew what an earlier pass gave.
void GradientReducer::begin_pass(const Slot& first) {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass != std::exchange(last_pass_, pass) && fate_of_gradients(&first).first == Fate::ThrownAway) throw_away();
  begin_round();
}

bool GradientReducer::is_under_way(const Slot& slot) const { return !slot.compressed && round_of(slot).is_under_way(slot.member); }

/// What has become of the gradients that are under way, and the first that is not as it was left. `just_given`: backward has added to
/// this one since.
std::pair<GradientReducer::Fate, const GradientReducer::Slot*> GradientReducer::fate_of_gradients(const Slot* just_given) const {
  using Since = detail::GradientMark::Since;
  std::size_t under_way = 0, gone = 0;
  const Slot* changed = nullptr;
  for (const auto& slot : slots_) {
    if (!is_under_way(slot)) continue;
    ++under_way;
    const at::Tensor& gradient = slot.named.parameter.grad();
    const Since since = slot.mark.since(gradient);
    if (since == Since::Same) continue;
    if (since == Since::Changed && (slot.sparse || &slot == just_given)) continue;  // sparse ones leave later
    if (since != Since::Changed && (!gradient.defined() || &slot == just_given || is_zero(gradient))) ++gone;
    if (changed == nullptr) changed = &slot;
  }
  if (changed == nullptr) return {Fate::Untouched, nullptr};
  return {gone == under_way ? Fate::ThrownAway : Fate::Changed, changed};
}

/// The other ranks may wait for what this one has given, or this one has not: the round is made, and what it gives dropped.
void GradientReducer::throw_away() {
  reduce(Round::ThrownAway);
  drop_shares();
  forget();
  for (auto& slot : slots_) slot.reduced = false;
  history_.end_round();
}

/// In a world of one, where nothing is added: what a user has made of gradients that are under way is what counts.
void GradientReducer::keep_changes() {
  for (auto& slot : slots_) {
    const auto is_changed = [&slot] { return slot.mark.since(slot.named.parameter.grad()) != detail::GradientMark::Since::Same; };
    round_of(slot).keep(slot.member, is_under_way(slot) && is_changed());
  }
}

/// Whether a user has put gradients where a round gave others, or none.
bool GradientReducer::given_anew() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.mark.since(slot.named.parameter.grad()) == detail::GradientMark::Since::Replaced;
  });
}

/// What is a sum over the ranks already enters the next one in equal parts.
void GradientReducer::share_out(Slot& slot) {
  at::Tensor& gradient = slot.named.parameter.mutable_grad();
  if (!std::exchange(slot.reduced, false) || !sums() || !gradient.defined()) return;
  if (slot.mark.since(gradient) != detail::GradientMark::Since::Replaced) gradient.div_(options_.process_set.size());
}

}  // namespace hvd
