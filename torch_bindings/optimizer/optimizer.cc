#include "torch_bindings/optimizer/optimizer.h"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/optimizer/adasum_deltas.h"
#include "torch_bindings/optimizer/shared_groups.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/precision/master_optimizer.h"
#include "torch_bindings/precision/state_parts.h"
#include "torch_bindings/reducer/reducer.h"
#include "torch_bindings/reducer/step_watch.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd {

namespace {

using torch::optim::OptimizerParamGroup;

/// The optimizers made so far, by the ranks they are on: those ranks all count alike, whatever the others do.
int& optimizers_made(const ProcessSet& process_set) {
  static std::map<std::vector<int>, int> made;
  return made[process_set.ranks()];
}

void check_adasum(const DistributedOptimizerOptions& options) {
  const auto refuse = [](const char* what) {
    throw InvalidArgument(formatted("ReduceOp::Adasum combines what each rank's own step changes, so it does not go with {}", what));
  };
  if (options.shard_optimizer_state) refuse("shard_optimizer_state: no rank steps all parameters then");
  if (options.share_parameters) refuse("share_parameters: no rank has parameters of its own then");
  if (options.gradient_predivide_factor != 1) refuse("gradient_predivide_factor: gradients are not reduced");
  if (options.compression.needs_memory()) refuse("int8, topk or powersgd compression; use none, fp16 or bf16");
}

void check_shards_of_gradients(const DistributedOptimizerOptions& options) {
  const auto refuse = [](const char* what) { throw InvalidArgument(formatted("shard_gradients does not go with {}", what)); };
  if (options.op == ReduceOp::Adasum) refuse("ReduceOp::Adasum: gradients are not reduced then");
  if (options.share_parameters) refuse("share_parameters: use one of them");
  if (options.compression.needs_memory())
    refuse("int8, topk or powersgd compression, which remembers all gradients on every rank; use none, fp16 or bf16");
}

void check(const DistributedOptimizerOptions& options) {
  if (options.shard_gradients) check_shards_of_gradients(options);
  if (options.backward_passes_per_step < 1)
    throw InvalidArgument(formatted("backward_passes_per_step is {}; it must be at least 1", options.backward_passes_per_step));
  if (options.op == ReduceOp::Adasum) check_adasum(options);
  if (options.op != ReduceOp::Average && options.op != ReduceOp::Sum && options.op != ReduceOp::Adasum)
    throw InvalidArgument(formatted("gradients cannot be reduced by {}: use average, sum or adasum", name_of(options.op)));
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::Average)
    throw InvalidArgument("gradient_predivide_factor goes with ReduceOp::Average only");
  if (!(options.gradient_predivide_factor > 0))
    throw InvalidArgument(formatted("gradient_predivide_factor is {}; it must be greater than 0", options.gradient_predivide_factor));
}

/// While the wrapped optimizer steps, its groups are this rank's pieces, if it is sharded, or the masters, if there are any.
class Lent {
 public:
  Lent(OptimizerShards* shards, detail::MasterCopies* masters, bool closure) : shards_(shards), masters_(shards ? nullptr : masters) {
    using Which = detail::MasterCopies::Lent;
    if (shards_ != nullptr) shards_->lend();
    if (masters_ != nullptr) masters_->lend(closure ? Which::OfAll : Which::WithGradient);
  }
  ~Lent() {
    if (shards_ != nullptr) shards_->take_back();
    if (masters_ != nullptr) masters_->take_back();
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  OptimizerShards* const shards_;
  detail::MasterCopies* const masters_;
};

/// The optimizer that a wrapper steps.
torch::optim::Optimizer& without_masters(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<DistributedOptimizer*>(&optimizer) != nullptr)
    throw InvalidArgument("a DistributedOptimizer around a DistributedOptimizer: make one, around the optimizer itself");
  auto* const masters = detail::Wrappers::around<detail::MasterOptimizer>(optimizer);
  if (masters == nullptr) return optimizer;
  masters->share_changes();
  return masters->wrapped();
}

std::vector<GradientReducer::Named> from(const std::vector<std::pair<std::string, at::Tensor>>& parameters, std::size_t first) {
  std::vector<GradientReducer::Named> named;
  for (std::size_t i = first; i < parameters.size(); ++i) named.push_back({parameters[i].first, parameters[i].second});
  return named;
}

constexpr const char* kMoved =
    "this DistributedOptimizer was moved: use the one that it was moved into, and make schedulers after that, or on its wrapped()";

/// The options of the one group that is left where a wrapper was: what a scheduler meets that was made there.
struct MovedOptions : torch::optim::OptimizerCloneableOptions<MovedOptions> {
  [[nodiscard]] double get_lr() const override { throw InvalidArgument(kMoved); }
  void set_lr(double /*rate*/) override { throw InvalidArgument(kMoved); }
};

/// Returns what `optimizer` points to.
torch::optim::Optimizer& checked_wrapped(const std::unique_ptr<torch::optim::Optimizer>& optimizer) {
  if (!optimizer) throw InvalidArgument("DistributedOptimizer: the std::unique_ptr to the optimizer is null");
  return *optimizer;
}

/// Before an InvalidArgument that is this rank's alone: `call` lets the others know in what they do next, where they would wait for it.
template <class Call>
void refuse(const Call& call) {
  try {
    call();
  } catch (const Mismatch&) {  // they know
  }
}

}  // namespace

void detail::drop_scratch(torch::optim::Optimizer& optimizer) {
  for (auto& [parameter, state] : optimizer.state())
    if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(state.get())) lbfgs->al(std::nullopt);
}

DistributedOptimizer::DistributedOptimizer(torch::optim::Optimizer& wrapped,
                                           std::vector<std::pair<std::string, at::Tensor>> named_parameters,
                                           DistributedOptimizerOptions options)
    : Optimizer(without_masters(wrapped).param_groups(), wrapped.defaults().clone()),
      place_(std::make_shared<Place>()),
      masters_(detail::Wrappers::around<detail::MasterOptimizer>(wrapped)),
      wrapped_(&without_masters(wrapped)),
      options_(std::move(options)),
      skips_(std::make_shared<int>(0)) {
  place_->now = this;
  check(options_);
  if (options_.shard_gradients) options_.shard_optimizer_state = true;
  if (masters_ != nullptr && options_.op == ReduceOp::Adasum)
    throw InvalidArgument(
        "ReduceOp::Adasum combines what each rank's own step changes in the 16-bit parameters, so it does not go with MasterWeights");
  OptimizerShards::refuse_shares(*wrapped_);
  groups_ = std::make_unique<detail::SharedGroups>(param_groups_, *wrapped_, named_parameters);
  if (options_.process_set.included()) begin();
  detail::Wrappers::add(*wrapped_, *this);
  if (masters_ != nullptr) detail::Wrappers::add(*masters_, *this);
}

/// What a rank of the process set does besides.
void DistributedOptimizer::begin() {
  detail::GradientOwners::refuse_others("optimizer", groups_->parameters());
  if (options_.process_set.size() > 1) watch_ = std::make_shared<detail::StepWatch>(*wrapped_);
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  int& number = optimizers_made(options_.process_set);
  number_ = number;
  take_in(0);
  ++number;  // not before: one that is refused on some ranks only must not put their numbers out of step
  agreed_ = reducers_.size();
  options_.groups = {};  // they are of the parameters from the start
}

DistributedOptimizer::DistributedOptimizer(std::unique_ptr<torch::optim::Optimizer> wrapped,
                                           std::vector<std::pair<std::string, at::Tensor>> named_parameters,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(checked_wrapped(wrapped), std::move(named_parameters), std::move(options)) {
  owned_ = std::move(wrapped);
}

DistributedOptimizer::~DistributedOptimizer() { end(); }

DistributedOptimizer::DistributedOptimizer(DistributedOptimizer&& other) noexcept : Optimizer(std::move(other)) { take(other); }

DistributedOptimizer& DistributedOptimizer::operator=(DistributedOptimizer&& other) noexcept {
  if (this == &other) return *this;
  end();
  Optimizer::operator=(std::move(other));
  take(other);
  return *this;
}

/// After the base: the rest, and all that knows where `other` was.
void DistributedOptimizer::take(DistributedOptimizer& other) noexcept {
  owned_ = std::move(other.owned_);
  place_ = std::move(other.place_);
  masters_ = std::exchange(other.masters_, nullptr);
  wrapped_ = std::exchange(other.wrapped_, nullptr);
  watch_ = std::move(other.watch_);
  options_ = std::move(other.options_);
  groups_ = std::move(other.groups_);
  number_ = other.number_;
  reducers_ = std::exchange(other.reducers_, {});
  agreed_ = other.agreed_;
  deltas_ = std::move(other.deltas_);
  shards_ = std::move(other.shards_);
  changed_ = other.changed_;
  unannounced_ = other.unannounced_;
  skips_ = std::move(other.skips_);
  other.param_groups_.clear();
  other.param_groups_.emplace_back(std::vector<at::Tensor>{}, std::make_unique<MovedOptions>());
  if (!place_) return;  // it had been moved away before
  place_->now = this;
  groups_->follow(param_groups_);
  detail::Wrappers::move(other, *this);
}

void DistributedOptimizer::end() noexcept {
  if (!place_) return;
  for (const auto& reducer : reducers_) reducer->unhook();
  detail::Wrappers::remove(*this);
  place_->now = nullptr;
  shards_.reset();
  deltas_.reset();
  reducers_.clear();
  groups_.reset();
  owned_.reset();
}

/// Throws where this has been moved away.
const DistributedOptimizer& DistributedOptimizer::here() const {
  if (!place_) throw InvalidArgument(kMoved);
  return *this;
}

namespace {

ReplicaComparer::Terms terms_of(const detail::SharedGroups& groups) {
  return {.digest = [&groups] { return groups.digest_of_options(); }, .words = [&groups] { return groups.words_of_options(); }};
}

}  // namespace

/// The parameters from place `first` on.
void DistributedOptimizer::take_in(std::size_t first) {
  const auto& parameters = groups_->parameters();
  const std::string name = formatted("optimizer.{}", number_);
  if (options_.op == ReduceOp::Adasum) {
    if (!deltas_)
      deltas_ = std::make_unique<AdasumDeltas>(AdasumDeltas::Terms{.compression = options_.compression,
                                                                   .process_set = options_.process_set,
                                                                   .name = name,
                                                                   .passes = options_.backward_passes_per_step,
                                                                   .replicas = terms_of(*groups_),
                                                                   .witness = watch_});
    return deltas_->add(parameters, first);
  }
  const std::string part = first == 0 ? "" : formatted("/added.{}", reducers_.size());
  auto reducer =
      std::make_shared<GradientReducer>(from(parameters, first), options_, number_, "optimizer", GradientReducer::Taking::ByDevice, part);
  const auto runs = options_.shard_gradients ? reducer->parameters_by_bucket() : OptimizerShards::Runs{};
  if (shards_) {
    shards_->add(parameters, first, runs);
  } else if (options_.shard_optimizer_state || options_.share_parameters) {
    shards_ = std::make_unique<OptimizerShards>(*wrapped_, options_.process_set, name, parameters, options_.share_parameters,
                                                master_copies(), runs);
  }
  if (shards_gradients()) {
    shards_->keep_gradients();
    reducer->keep_shares(shards_.get());
  }
  if (reducers_.empty()) reducer->watch(terms_of(*groups_));
  if (!reducers_.empty()) reducer->set_join(reducers_.front()->join_rounds());
  if (!reducers_.empty()) reducer->set_weight(reducers_.front()->weight());
  reducer->hook({.witness = watch_});
  reducers_.push_back(std::move(reducer));
}

/// Takes over what has been changed through the other optimizer. What it throws it throws again each time, until the cause has gone.
void DistributedOptimizer::reconcile() {
  here();
  if (masters_ != nullptr) masters_->share_changes();
  const std::size_t known = groups_->parameters().size();
  if (groups_->reconcile() && !is_local()) {
    try {
      take_over_changes(known);
    } catch (...) {
      groups_->forget_from(known);
      throw;
    }
    changed_ = unannounced_ = true;
  }
  if (shards_) shards_->check_untouched();
}

void DistributedOptimizer::take_over_changes(std::size_t known) {
  if (known < groups_->parameters().size()) {
    detail::GradientOwners::refuse_others("optimizer", groups_->parameters(), known);
    take_in(known);
    if (agreed_ < reducers_.size()) reducers_.back()->listen(false);
  } else if (shards_) {
    shards_->add(groups_->parameters(), known);
  }
}

/// At the end of a call that all ranks make: none of them has submitted anything of the next round yet, which is to compare the groups.
/// Returns whether there was something to announce.
bool DistributedOptimizer::announce_changes() {
  if (!std::exchange(unannounced_, false) || reducers_.empty()) return false;
  reducers_.front()->announce(groups_->layout());
  return true;
}

/// From now on that reducer is used, which other ranks may not have: they compare first, unless the round before has compared.
void DistributedOptimizer::take_up(std::size_t reducer) {
  if (unannounced_) reducers_.front()->compare(groups_->layout());
  unannounced_ = false;
  reducers_[reducer]->listen(true);
  agreed_ = reducer + 1;
}

/// What there is to say of it here: where parameters differ as the optimizer was stepped by itself, that it was.
std::exception_ptr DistributedOptimizer::cause_of(const Mismatch& error) {
  const std::string text = error.what();
  if (watch_ && text.find(detail::kParametersDiffer) != std::string::npos) {
    const std::string name = watch_->stepped(groups_->parameters());
    watch_->attend();
    if (!name.empty()) return std::make_exception_ptr(InvalidArgument(detail::StepWatch::words_of(name)));
  }
  const std::string hint = changed_ ? " (here the groups of the optimizer have been changed since the last step; do so on all ranks)" : "";
  return std::make_exception_ptr(Mismatch(text + hint));
}

/// All reducers, also after one that has failed, but for those that other ranks may not have. An InvalidArgument is this rank's alone:
/// the others go on to them.
void DistributedOptimizer::reduce(bool also_synchronized) {
  std::exception_ptr failure;
  bool on_all_ranks = false;
  for (std::size_t i = 1; i < agreed_; ++i) {
    try {
      reducers_[i]->tell_weight();
    } catch (const InvalidArgument&) {  // as its own turn will say
      failure = std::current_exception();
    }
  }
  for (std::size_t i = 0; i < reducers_.size(); ++i) {
    if (on_all_ranks && i >= agreed_) break;
    if (!also_synchronized && reducers_[i]->is_synchronized()) continue;
    try {
      if (i >= agreed_) take_up(i);
      reducers_[i]->synchronize();
    } catch (const Deadlock&) {  // the others are somewhere else
      on_all_ranks = true;
      failure = std::current_exception();
      break;
    } catch (const Mismatch& error) {
      on_all_ranks = true;
      if (!failure) failure = cause_of(error);
    } catch (const InvalidArgument&) {
      if (!failure) failure = std::current_exception();
    } catch (...) {
      on_all_ranks = true;
      if (!failure) failure = std::current_exception();
    }
  }
  const bool compares_next = announce_changes();
  if (!on_all_ranks) {  // of an error that is this rank's alone the others have not heard: they have compared their groups
    changed_ = compares_next;
    if (!changed_) groups_->note_agreed();
  }
  if (failure) {
    note_state();  // what follows is no step of these gradients
    std::rethrow_exception(failure);
  }
  refuse_own_step();
}

/// Where this is called, and the ranks have done together what they had to: whether the optimizer was stepped by itself meanwhile.
void DistributedOptimizer::refuse_own_step() {
  if (!watch_) return;
  const std::string name = watch_->stepped(groups_->parameters());
  watch_->attend();
  if (!name.empty()) throw InvalidArgument(detail::StepWatch::words_of(name));
}

void DistributedOptimizer::synchronize() {
  reconcile();
  reduce(true);
}

void DistributedOptimizer::synchronize_once() {
  reconcile();
  if (*skips_ == 0) reduce(false);
}

void DistributedOptimizer::check_replicas() {
  reconcile();
  for (const auto& reducer : reducers_) reducer->check_replicas();
  if (deltas_) deltas_->check_replicas();
}

void DistributedOptimizer::leave_out_step() {
  here();
  note_state();
  for (const auto& reducer : reducers_) reducer->begin_step();
  if (deltas_) deltas_->begin_step();
  if (masters_ != nullptr) masters_->leave_out_step();
  if (shards_gradients()) shards_->drop_gradients();
}

at::Tensor DistributedOptimizer::step(LossClosure closure) {
  reconcile();
  if (is_local()) return wrapped().step(std::move(closure));
  if (deltas_) {
    refuse_own_step();
    return step_by_deltas(closure);
  }
  at::Tensor loss;
  if (closure) {
    loss = step_with_closure(closure);
  } else {
    try {
      if (*skips_ == 0) reduce(false);
    } catch (const InvalidArgument& error) {
      if (shards_) refuse([&] { shards_->begin_update(error.what()); });
      throw;
    }
    if (shards_) shards_->begin_update();
    loss = step_wrapped();
  }
  if (shards_) shards_->end_update();
  leave_out_step();  // what comes next is new
  return loss;
}

/// Without gradients to wait for. Whatever it throws, the other ranks do not wait for this one's share.
at::Tensor DistributedOptimizer::step_wrapped(const LossClosure& closure) {
  try {
    const Lent lent(shards_.get(), master_copies(), closure != nullptr);
    return wrapped_->step(closure);
  } catch (...) {
    if (shards_) refuse([&] { shards_->fail_update(detail::words_of_current_exception()); });
    throw;
  }
}

/// An optimizer may decide by the loss (LBFGS): it gets that of all ranks, so that all decide alike. The user gets this rank's own.
at::Tensor DistributedOptimizer::step_with_closure(const LossClosure& closure) {
  std::vector<std::pair<at::Tensor, at::Tensor>> losses;
  const at::Tensor loss = step_wrapped([&] {
    if (shards_) shards_->interrupt_update();
    if (masters_ != nullptr) master_copies()->take_back();
    for (const auto& reducer : reducers_)
      if (*skips_ == 0) reducer->begin_evaluation();
    const at::Tensor own = closure();
    try {
      if (*skips_ == 0) synchronize();
    } catch (const InvalidArgument& error) {
      if (own.defined()) refuse([&] { static_cast<void>(reducers_.front()->reduce_loss(own, error.what())); });
      throw;
    }
    if (*skips_ == 0 && own.defined()) losses.emplace_back(reducers_.front()->reduce_loss(own), own);
    if (shards_) shards_->resume_update();
    if (masters_ != nullptr && !shards_) master_copies()->lend(detail::MasterCopies::Lent::OfAll);
    return *skips_ > 0 || !own.defined() ? own : losses.back().first;
  });
  const auto mine = std::find_if(losses.begin(), losses.end(), [&](const auto& both) { return loss.is_same(both.first); });
  return mine != losses.end() ? mine->second : loss;
}

at::Tensor DistributedOptimizer::step_by_deltas(const LossClosure& closure) {
  if (options_.process_set.size() == 1) {
    deltas_->begin_step();
    return wrapped_->step(closure);
  }
  deltas_->remember();
  at::Tensor loss;
  const auto counted = [&] {
    const at::Tensor own = closure();
    deltas_->begin_step();  // an optimizer may evaluate it often
    if (watch_) watch_->attend();
    return own;
  };
  try {
    loss = wrapped_->step(closure ? LossClosure(counted) : nullptr);
  } catch (...) {
    deltas_->put_back();
    throw;
  }
  deltas_->combine();
  deltas_->begin_step();
  if (watch_) watch_->attend();
  return loss;
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  reconcile();
  for (const auto& reducer : reducers_) {
    try {
      reducer->settle();
    } catch (const Mismatch& error) {
      std::rethrow_exception(cause_of(error));
    }
  }
  announce_changes();
  if (deltas_) deltas_->begin_step();
  if (masters_ != nullptr) masters_->leave_out_step();
  if (shards_gradients()) shards_->drop_gradients();
  std::exception_ptr stepped;  // thrown when the others have what they wait for
  try {
    refuse_own_step();
  } catch (const InvalidArgument&) {
    stepped = std::current_exception();
  }
  wrapped_->zero_grad(set_to_none);
  if (stepped) std::rethrow_exception(stepped);
}

void DistributedOptimizer::set_backward_passes_per_step(int passes) {
  here();
  if (passes < 1) throw InvalidArgument(formatted("backward_passes_per_step is {}; it must be at least 1", passes));
  options_.backward_passes_per_step = passes;
  for (const auto& reducer : reducers_) reducer->set_passes(passes);
  if (deltas_) deltas_->set_passes(passes);
}

void DistributedOptimizer::set_weight(double n) {
  here();
  detail::check_weight(n);
  if (options_.op != ReduceOp::Average)
    throw InvalidArgument(formatted("set_weight() goes with ReduceOp::Average: by {} every rank counts as it is", name_of(options_.op)));
  for (const auto& reducer : reducers_) {
    if (reducer->is_synchronized())
      throw InvalidArgument(
          "set_weight(): the gradients of this step are reduced already; call it after step(), before the next backward()");
    reducer->refuse_late_weight();
  }
  for (const auto& reducer : reducers_) reducer->set_weight(n);
}

void DistributedOptimizer::unshard() {
  reconcile();
  if (!shards_) return;
  if (shards_gradients() && !shards_->gradients().empty())
    throw InvalidArgument("unshard(): the gradients are in shares; call step() or zero_grad() before");
  shards_->give_back();
  if (shards_gradients())
    for (const auto& reducer : reducers_) reducer->keep_shares(nullptr);
  shards_.reset();
  options_.shard_optimizer_state = options_.share_parameters = options_.shard_gradients = false;
}

DistributedOptimizer::ParameterWriting::ParameterWriting(DistributedOptimizer& optimizer) : place_(optimizer.here().place_) {
  optimizer.reconcile();
  if (optimizer.shares_parameters()) optimizer.shards_->begin_update();
}

DistributedOptimizer::ParameterWriting::~ParameterWriting() {
  try {
    if (place_->now != nullptr && place_->now->shares_parameters()) place_->now->shards_->end_update();
  } catch (const Error&) {  // the world has ended or failed, as its next operation says
  }
}

bool DistributedOptimizer::ParameterWriting::is_writer() const {
  return place_->now == nullptr || !place_->now->shards_ || place_->now->shards_->is_writer();
}

std::vector<std::pair<std::string, at::Tensor>> DistributedOptimizer::gradient_shares() {
  return shards_gradients() ? shards_->gradients() : std::vector<std::pair<std::string, at::Tensor>>{};
}

bool DistributedOptimizer::shares_parameters() const { return shards_ && shards_->shares_parameters(); }

std::vector<OptimizerParamGroup>& DistributedOptimizer::param_groups() {
  reconcile();
  return param_groups_;
}

ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& DistributedOptimizer::state() {
  return here().wrapped_->state();
}

torch::optim::Optimizer& DistributedOptimizer::wrapped() {
  here();
  return masters_ != nullptr ? static_cast<torch::optim::Optimizer&>(*masters_) : *wrapped_;
}

detail::MasterCopies* DistributedOptimizer::master_copies() const { return masters_ != nullptr ? &masters_->copies() : nullptr; }

void DistributedOptimizer::note_state() {
  if (watch_) watch_->attend();
}

std::vector<std::vector<std::string>> DistributedOptimizer::names_by_group() {
  reconcile();
  std::map<const void*, std::string> names;
  for (const auto& [name, parameter] : groups_->parameters()) names[parameter.unsafeGetTensorImpl()] = name;
  std::vector<std::vector<std::string>> all;
  for (const auto& group : param_groups_) {
    auto& of_group = all.emplace_back();
    for (const auto& parameter : group.params())
      if (const auto node = names.extract(parameter.unsafeGetTensorImpl())) of_group.push_back(node.mapped());
  }
  return all;
}

std::function<void()> DistributedOptimizer::remember_masters() { return shards_->remember_masters(); }

std::vector<at::Tensor> DistributedOptimizer::compression_memory() const {
  std::vector<at::Tensor> memory;
  for (const auto& reducer : reducers_) {
    if (reducer->compressor() == nullptr) continue;
    const auto more = reducer->compressor()->memory();
    memory.insert(memory.end(), more.begin(), more.end());
  }
  return memory;
}

std::vector<at::Tensor> DistributedOptimizer::state_of_rank() const {
  std::vector<at::Tensor> tensors;
  if (options_.op != ReduceOp::Adasum || is_local()) return tensors;
  for (const auto& [name, parameter] : groups_->parameters()) {
    const auto found = wrapped_->state().find(parameter.unsafeGetTensorImpl());
    if (found == wrapped_->state().end() || !found->second) continue;
    for (const at::Tensor* const tensor : detail::parts_of(*found->second).tensors)
      if (tensor->defined()) tensors.push_back(*tensor);
  }
  return tensors;
}

std::uint64_t DistributedOptimizer::bytes_sent() const {
  std::uint64_t bytes = 0;
  for (const auto& reducer : reducers_) bytes += reducer->bytes_sent();
  return bytes;
}

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const_cast<DistributedOptimizer*>(this)->reconcile();
  detail::drop_scratch(*wrapped_);
  if (shards_) return shards_->save(archive);
  masters_ != nullptr ? masters_->save(archive) : wrapped_->save(archive);
}

void DistributedOptimizer::save_on(int rank, torch::serialize::OutputArchive& archive) {
  reconcile();
  shards_->save(archive, rank);
}

void DistributedOptimizer::load(torch::serialize::InputArchive& archive) { load_unread(archive, nullptr); }

void DistributedOptimizer::load_unread(torch::serialize::InputArchive& archive, detail::CheckpointReader* reader) {
  reconcile();
  const auto load_wrapped = [&] {
    if (masters_ != nullptr) {
      const detail::RepeatedParameters each_once(*wrapped_, detail::RepeatedParameters::Places::LeftOut);
      return wrapped_->load(archive);
    }
    detail::load_state(*wrapped_, archive);
  };
  if (shards_) {
    shards_->load(load_wrapped, archive, reader);
  } else {
    masters_ != nullptr ? masters_->load(archive) : load_wrapped();
  }
  groups_->take_options();
  note_state();
}

}  // namespace hvd
