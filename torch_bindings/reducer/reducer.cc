// When a GradientReducer makes rounds, and what it knows of them afterwards.
#include "torch_bindings/reducer/reducer.h"

#include <torch/torch.h>

#include <algorithm>

#include "hvd/api/joins.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/gradients/gradient_hooks.h"
#include "torch_bindings/reducer/join_rounds.h"

namespace hvd {

namespace {

/// Returns those that get gradients. Refuses others than the rank's GPU here, where nothing is
/// under way yet, and not in the middle of a backward pass.
std::vector<NamedParameter> on_gpu_of_rank(std::vector<NamedParameter> parameters) {
  const int device = engine()->device();
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.is_cuda() || device < 0 || size() == 1 || parameter.get_device() == device)
      continue;
    throw InvalidArgument(
        formatted("parameter '{}' is on {}, and the GPU of rank {} is cuda:{} "
                  "(hvd::local_device()); move the model there before it is wrapped",
                  name, parameter.device().str(), rank(), device));
  }
  std::erase_if(parameters,
                [](const auto& named) { return !detail::gets_gradients(named.parameter); });
  return parameters;
}

/// In a world of one, where nothing is added: what a user has made of gradients that are under way
/// is what counts.
void keep_changes(ReducerBuckets& buckets) {
  for (const auto& slot : buckets.slots())
    buckets.round_of(slot).keep(
        slot.member,
        buckets.is_under_way(slot) && slot.since_mark() != detail::GradientMark::Since::Same);
}

/// Returns whether a user has put gradients where a round gave others, or none.
bool are_given_anew(const std::vector<GradientSlot>& slots) {
  return std::any_of(slots.begin(), slots.end(),
                     [](const auto& slot) { return slot.is_replaced(); });
}

/// Makes a round of a backward pass that has thrown. What a user's zero_grad() has made zeros in
/// place is zeros afterwards: what was on its way has overwritten it.
void throw_pass_away(ReducerBuckets& buckets, RoundHistory& history, bool alone) {
  std::vector<at::Tensor> changed;
  for (const auto& slot : buckets.slots())
    if (!alone && buckets.is_under_way(slot) && buckets.round_of(slot).is_submitted() &&
        !slot.sparse_dims && slot.since_mark() == detail::GradientMark::Since::Changed)
      changed.push_back(slot.gradient());
  history.fail(true);
  detail::FirstFailure failure;
  failure.attempt([&] { buckets.throw_away(false); });
  history.fail(false);
  history.throw_away();
  for (auto& gradient : changed) gradient.zero_();
  failure.rethrow();
}

}  // namespace

GradientReducer::GradientReducer(const std::vector<Named>& parameters,
                                 DistributedOptimizerOptions options, int number,
                                 const std::string& kind, Taking taking, const std::string& part)
    : options_(std::move(options)),
      owner_(options_.process_set, kind),
      name_(formatted("{}.{}{}", kind, number, part)),
      passes_per_step_(options_.backward_passes_per_step),
      weights_(options_.process_set),
      history_(name_),
      replicas_(name_, options_.process_set),
      buckets_(on_gpu_of_rank(parameters), options_, name_, taking,
               {.weights = weights_,
                .history = history_,
                .replicas = replicas_,
                .found =
                    [this](const GradientSlot& slot) {
                      // a user's has taken its place
                      if (hooked_ && !detail::has_gradient_hook(slot.named.parameter, this))
                        put_hook(static_cast<std::size_t>(&slot - buckets_.slots().data()));
                    },
                .ended =
                    [this] {
                      if (!join_) return;
                      const double factor = join_->end_round();
                      // weights say already what each rank counts
                      join_factor_ =
                          options_.op == ReduceOp::Average && !weights_.own() ? factor : 1;
                    }}) {
  note_joins(options_.process_set, joins_);
  for (const auto& slot : buckets_.slots()) owner_.add(slot.named.parameter);
  ReplicaComparer::Named watched;
  for (const auto& [name, parameter] : parameters) watched.emplace_back(name, parameter);
  replicas_.watch(watched);
}

void GradientReducer::keep_shares(GradientKeeper* keeper) {
  const std::lock_guard lock(mutex_);
  shares_kept_ = false;
  const at::NoGradGuard no_gradient;
  buckets_.keep_shares(keeper);
}

std::uint64_t GradientReducer::bytes_sent() const {
  const std::lock_guard lock(mutex_);
  return buckets_.bytes_sent();
}

std::vector<std::pair<std::string, at::Tensor>> GradientReducer::parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& slot : buckets_.slots()) all.emplace_back(slot.named.name, slot.named.parameter);
  return all;
}

bool GradientReducer::requires_gradients() const {
  const auto& slots = buckets_.slots();
  return std::any_of(slots.begin(), slots.end(),
                     [](const auto& slot) { return slot.named.parameter.requires_grad(); });
}

struct GradientReducer::Outcome {
  const GradientSlot* changed = nullptr;
  bool replaced = false;  ///< by a gradient in other memory
};

void GradientReducer::synchronize() {
  const auto [changed, replaced] = synchronize_gradients();
  if (changed == nullptr) return;
  if (replaced && detail::GradientOwners::count(changed->named.parameter) > 1)
    throw InvalidArgument(
        formatted("gradient of '{}': the parameter is in two DistributedOptimizers, and both have "
                  "reduced what one backward pass gave it; leave it to one of them, or make one "
                  "optimizer with a parameter group for each part of the model",
                  changed->named.name));
  throw InvalidArgument(
      formatted("gradient of '{}': it was changed after backward() while its reduction was under "
                "way, so what all ranks got is not their average or sum; call synchronize() before "
                "clipping or changing gradients (hvd::clip_grad_norm_ does), and the optimizer's "
                "zero_grad() to throw them away",
                changed->named.name));
}

void GradientReducer::set_join(std::shared_ptr<detail::JoinRounds> join) {
  join_ = std::move(join);
  join_factor_ = 1;
}

/// Returns whether all ranks have joined since the last call: nobody waits for what this one has
/// given before, and what comes next is new on all of them.
bool GradientReducer::has_joined() {
  if (!note_joins(options_.process_set, joins_)) return false;
  history_.begin_step();
  return true;
}

GradientReducer::Outcome GradientReducer::synchronize_gradients() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  if (synchronized_ && !are_given_anew(buckets_.slots())) return {};
  if (synchronized_ && shares_kept_)
    throw InvalidArgument(
        "with shard_gradients the gradients are in shares after synchronize(), and a gradient that "
        "is put into `.grad` then would be added to them: change gradient_shares() instead, or "
        "step under skip_synchronize()");
  const bool joined = has_joined();
  const auto [fate, changed] = buckets_.fate_of_gradients();
  const bool replaced = changed != nullptr && changed->is_replaced();
  const bool alone = options_.process_set.size() == 1;
  if (alone) keep_changes(buckets_);
  if (fate == ReducerBuckets::Fate::ThrownAway && !alone) buckets_.throw_away(joined);
  reduce_until_none_is_late();
  if (fate != ReducerBuckets::Fate::Changed || alone) return {};
  synchronized_ = false;
  history_.refuse(changed->named.name);
  return {.changed = changed, .replaced = replaced};
}

void GradientReducer::finish_pass(bool has_thrown) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  history_.begin_anew();
  try {
    has_thrown ? throw_pass_away(buckets_, history_, options_.process_set.size() == 1)
               : reduce_until_none_is_late();
  } catch (...) {
    history_.begin_anew();
    weights_.set({});
    history_.drop_announcement();
    throw;
  }
  if (!has_thrown) history_.begin_step();
  weights_.set({});
  replicas_.note_step();
}

/// Makes rounds until no gradient has come late. What a round gave is not summed again.
void GradientReducer::reduce_until_none_is_late() {
  auto& slots = buckets_.slots();
  for (bool again = true; again;) {
    again = buckets_.has_late();
    synchronized_ = false;
    buckets_.reduce(ReducerBuckets::Round::Kept);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      GradientSlot& slot = slots[i];
      slot.reduced = slot.gradient().defined() && !buckets_.round_of(slot).is_late(slot.member);
      if (slot.reduced && join_factor_ != 1) slot.gradient().mul_(join_factor_);
      slot.set_mark();
      // it may require a gradient since
      if (hooked_ && detail::has_gradient_hook(slot.named.parameter, this)) put_hook(i);
    }
    shares_kept_ = buckets_.keeps_shares();
    buckets_.forget();
    history_.end_round();
  }
  synchronized_ = true;
  buckets_.follow_parameters(ReducerBuckets::Between::SameBuckets);
}

bool GradientReducer::is_synchronized() const {
  const std::lock_guard lock(mutex_);
  return synchronized_;
}

void GradientReducer::settle() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  // Other ranks may have submitted buckets that this one has not, and wait for them in their own
  // zero_grad: all take part in all.
  if (has_joined()) {
    buckets_.let_finish();
  } else if (buckets_.has_gathered()) {
    buckets_.reduce(ReducerBuckets::Round::KeptButCompressed);
    history_.end_round();
  }
  history_.throw_away();
  buckets_.forget();
  for (auto& slot : buckets_.slots()) slot.reduced = false;
  buckets_.go_home();
  synchronized_ = shares_kept_ = false;
}

void GradientReducer::begin_step() {
  const std::lock_guard lock(mutex_);
  if (has_joined()) buckets_.let_finish();
  buckets_.forget();
  synchronized_ = shares_kept_ = false;
  history_.begin_step();
  weights_.end_step();
  replicas_.note_step();
}

void GradientReducer::begin_evaluation() {
  const std::lock_guard lock(mutex_);
  synchronized_ = false;
  history_.begin_anew();
}

void GradientReducer::set_passes(int passes) {
  const std::lock_guard lock(mutex_);
  passes_per_step_ = passes;
}

bool GradientReducer::has_begun() const {
  const std::lock_guard lock(mutex_);
  const auto& slots = buckets_.slots();
  return buckets_.has_begun() ||
         std::any_of(slots.begin(), slots.end(), [](const auto& slot) { return slot.passes > 0; });
}

void refuse_late_weight(const GradientReducer& reducer) {
  if (reducer.has_begun())
    throw InvalidArgument(
        "set_weight(): backward has begun, and gradients may have left; call it before the step's "
        "first backward(), with the number of all rows or tokens of the step");
}

void GradientReducer::set_weight(std::optional<double> weight) {
  refuse_late_weight(*this);
  const std::lock_guard lock(mutex_);
  weights_.set(weight);
}

std::optional<double> GradientReducer::weight() const {
  const std::lock_guard lock(mutex_);
  return weights_.own();
}

void GradientReducer::tell_weight() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  if (weights_.own() && !synchronized_) buckets_.begin_round();
}

at::Tensor GradientReducer::reduce_loss(const at::Tensor& loss, const std::string& refusal) const {
  const AllreduceOptions options{
      .name = formatted("{}/loss", name_), .op = options_.op, .process_set = options_.process_set};
  const at::Tensor own = weights_.own() ? weights_.weighed(loss.detach()) : loss.detach();
  const at::Tensor all = detail::allreduce_unless_refused(own, options, refusal);
  return join_factor_ == 1 ? all : all * join_factor_;
}

void GradientReducer::announce(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  history_.announce(std::move(layout), std::move(said));
}

void GradientReducer::compare(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  if (options_.process_set.size() == 1) return;
  const at::NoGradGuard no_gradient;
  history_.announce(std::move(layout), std::move(said));
  buckets_.compare();
}

void GradientReducer::watch(ReplicaComparer::Terms terms) {
  const std::lock_guard lock(mutex_);
  replicas_.watch(std::move(terms));
}

void GradientReducer::check_replicas() {
  const std::lock_guard lock(mutex_);
  replicas_.check();
}

}  // namespace hvd
