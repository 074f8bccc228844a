#include "torch_bindings/modules/distributed_data_parallel.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "hvd/api/joins.h"
#include "hvd/api/world.h"
#include "hvd/base/digest.h"
#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/gradients/local_gradients.h"
#include "torch_bindings/modules/sync_batch_norm.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/reducer/reducer.h"

namespace hvd::detail {

namespace {

using torch::autograd::get_current_graph_task_id;

/// Passes whose backward pass never comes are forgotten in the end.
constexpr std::size_t kOutstandingPasses = 4096;

/// Wrappers made so far on these ranks of a world: they count alike, whatever other worlds each of
/// them is in.
int next_number(const ProcessSet& process_set) {
  static std::mutex mutex;
  static std::map<std::pair<std::uint64_t, std::vector<int>>, int> made;
  const std::lock_guard lock(mutex);
  return made[{current_world_number(), process_set.ranks()}]++;
}

/// The number of a new wrapper, if it may be made.
int checked_number(const torch::nn::Module* module, const DistributedDataParallelOptions& options) {
  require_running();
  if (module == nullptr) throw InvalidArgument("DistributedDataParallel: the module is null");
  if (!(options.gradient_predivide_factor > 0))
    throw InvalidArgument(formatted("gradient_predivide_factor is {}; it must be greater than 0",
                                    options.gradient_predivide_factor));
  auto trained = unique_parameters(module->named_parameters().pairs());
  std::erase_if(trained, [](const auto& parameter) { return !parameter.second.requires_grad(); });
  if (trained.empty())
    throw InvalidArgument(
        "DistributedDataParallel: the module has no parameter that requires a gradient");
  GradientOwners::refuse_others("ddp", trained);
  return next_number(options.process_set);
}

/// Returns whether the pass that runs is backward(): all that it reaches gets its gradient, and not
/// just what somebody has asked for.
bool is_plain_backward() {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  return asked == nullptr || asked->empty();
}

/// "'head.weight', 'head.bias' and 3 more".
std::string names_of(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < std::min(kShown, parameters.size()); ++i)
    shown.push_back(formatted("'{}'", parameters[i].first));
  const std::string more =
      parameters.size() > kShown ? formatted(" and {} more", parameters.size() - kShown) : "";
  return joined(shown, ", ") + more;
}

}  // namespace

ModuleReducer::ModuleReducer(std::shared_ptr<torch::nn::Module> module,
                             DistributedDataParallelOptions options)
    : module_(std::move(module)),
      options_(std::move(options)),
      number_(checked_number(module_.get(), options_)),
      buffers_(module_, formatted("ddp.{}/buffers", number_), options_.process_set),
      kept_(std::make_unique<ReplicaComparer>(formatted("ddp.{}/kept buffers", number_),
                                              options_.process_set, "buffer")) {
  if (!options_.process_set.included()) {  // trains by itself; who steps together asks for the set
    alone_ = std::make_unique<GradientOwner>(options_.process_set, "ddp");
    for (const auto& parameter : module_->parameters())
      if (parameter.requires_grad()) alone_->add(parameter);
    return;
  }
  note_joins(options_.process_set, joins_);
  broadcast_parameters(*module_, options_.process_set.ranks().front(), options_.process_set);
  if (options_.broadcast_buffers) buffers_.are_equal();
  take_in_new();
  Named trained;
  std::erase_if(frozen_, [&trained](const auto& parameter) {
    if (parameter.second.requires_grad()) trained.push_back(parameter);
    return parameter.second.requires_grad();
  });
  add_reducer(trained, number_);
}

ModuleReducer::~ModuleReducer() {
  for (const auto& reducer : reducers_) reducer->unhook();
}

void ModuleReducer::add_reducer(const Named& parameters, int number) {
  DistributedOptimizerOptions reduction;
  reduction.compression = options_.compression;
  reduction.gradient_predivide_factor = options_.gradient_predivide_factor;
  reduction.sparse_as_dense = options_.sparse_as_dense;
  reduction.process_set = options_.process_set;
  reduction.gradients_are_views = options_.gradients_are_views;
  std::vector<GradientReducer::Named> named;
  for (const auto& [name, parameter] : parameters) named.push_back({name, parameter});
  auto reducer = std::make_shared<GradientReducer>(named, std::move(reduction), number, "ddp");
  reducer->set_join(rounds_);
  if (!reducers_.empty()) reducer->set_weight(reducers_.front()->weight());
  // The hooks are taken off before this ends.
  reducer->hook({.wants = [this](const GradientReducer::Named& given) {
    return takes_gradient(given.name, given.parameter);
  }});
  reducers_.push_back(std::move(reducer));
}

void ModuleReducer::set_weight(double n) {
  check_weight(n);
  if (get_current_graph_task_id() == -1) end_backward(/*has_thrown=*/true);  // it had its own
  for (const auto& reducer : reducers_) refuse_late_weight(*reducer);
  for (const auto& reducer : reducers_) reducer->set_weight(n);
}

std::vector<at::Tensor> ModuleReducer::compression_memory() const {
  std::vector<at::Tensor> all;
  for (const auto& reducer : reducers_)
    if (const auto* const compressor = reducer->compressor())
      for (auto& tensor : compressor->memory()) all.push_back(std::move(tensor));
  return all;
}

// ----------------------------------------------------------------------------------------- forward

ModuleReducer::Pass::Pass(ModuleReducer& reducer)
    : reducer_(reducer),
      synchronized_(at::GradMode::is_enabled() && reducer.unsynchronized == 0 &&
                    !reducer.reducers_.empty()),
      training_(reducer.module_->is_training()) {
  require_current(reducer_.world_, "DistributedDataParallel");
  reducer_.before_forward(synchronized_);
  if (at::GradMode::is_enabled()) number_ = reducer_.passes_++;
}

ModuleReducer::Pass::~Pass() {
  // The other ranks, whose pass has not thrown, wait in its backward pass: this rank's next one is
  // still of the same step.
  if (!done_ && synchronized_ && reducer_.module_->is_training())
    reducer_.are_buffers_ahead_ = true;
}

void ModuleReducer::Pass::mark(const at::Tensor& output) {
  // A leaf would keep the hook for good, and is no sign of a forward pass.
  if (!output.defined() || !output.requires_grad() || output.is_leaf()) return;
  marked_ = true;
  output.register_hook([weak = reducer_.weak_from_this(), number = number_,
                        synchronized = synchronized_, training = training_,
                        world = World::current()](const at::Tensor&) {
    const WorldScope scope(world, WorldScope::kAlsoGlobal);
    if (const auto self = weak.lock()) self->on_output(number, synchronized, training);
  });
}

void ModuleReducer::Pass::done() {
  done_ = true;
  if (!at::GradMode::is_enabled()) return;
  const std::lock_guard lock(reducer_.mutex_);
  auto& outstanding = reducer_.outstanding_;
  for (; reducer_.spent_ > 0 && !outstanding.empty(); --reducer_.spent_)
    outstanding.erase(outstanding.begin());
  reducer_.spent_ = 0;
  // In evaluation without NoGradGuard what is returned tells well enough whether there is a
  // backward pass.
  if (synchronized_ && (!marked_ || reducer_.module_->is_training())) outstanding.insert(number_);
  if (outstanding.size() > kOutstandingPasses) outstanding.erase(outstanding.begin());
}

void ModuleReducer::before_forward(bool synchronized) {
  if (reducers_.empty()) return;
  if (get_current_graph_task_id() == -1) {
    end_backward(/*has_thrown=*/true);  // if one is left over
    if (at::GradMode::is_enabled())
      for (const auto& reducer : reducers_) reducer->hook_again();
  }
  // Evaluation may be on one rank alone. If a backward pass follows, its end takes them in.
  if (synchronized && module_->is_training()) {
    take_in_new();
    reduce_unfrozen(take_unfrozen());
  }
  share_buffers(synchronized);
}

void ModuleReducer::share_buffers(bool synchronized) {
  // Twice a step. At the end of backward, so that ranks agree in evaluation and one may evaluate
  // alone; here, as PyTorch does, for what a user has made of the first rank's buffers since, which
  // no other rank could know of. 50 us each for ResNet-18's, 2 ranks.
  if (!options_.broadcast_buffers || options_.process_set.size() == 1 || unsynchronized > 0) return;
  if (!module_->is_training()) {
    if (std::exchange(are_buffers_own_, false)) buffers_.share(rounds_.get());
  } else if (synchronized) {
    if (!std::exchange(are_buffers_ahead_, false)) buffers_.share(rounds_.get());
    are_buffers_own_ = true;
  }
}

/// Has the round that begins compare what all ranks have: if parameters have changed since this
/// rank has had gradients that are not reduced yet, as that may have been step(); and before the
/// first pass of parameters that are new or were unfrozen, which these are, and what they hold.
void ModuleReducer::announce_changes() {
  std::uint64_t digest = 0;
  std::vector<std::string> said;
  if (const std::string* const changed = local_ ? local_->changed() : nullptr) {
    for (const auto& reducer : reducers_)
      for (const auto& [name, parameter] : reducer->parameters())
        digest = digest_of_values(parameter, digest);
    said.push_back(formatted(
        "has changed parameter '{}' while gradients of its own were not reduced yet (a step() "
        "after no_sync() alone, or after passes of the module itself: make the last pass of each "
        "group through {} and outside of no_sync(), or drop what is left; "
        "hvd::broadcast_parameters() makes the ranks equal again)",
        *changed, name()));
    local_.reset();
  }
  std::vector<Named> unknown;
  for (std::size_t i = agreed_; i < reducers_.size(); ++i)
    unknown.push_back(reducers_[i]->parameters());
  if (!unfrozen_.empty()) unknown.push_back(unfrozen_);
  for (std::size_t i = 0; i < unknown.size(); ++i) {
    digest += agreed_ + i;
    for (const auto& [name, parameter] : unknown[i])
      digest = digest_of_values(parameter, digest_of(name, digest));
    said.push_back(formatted(
        "has changed the parameters or groups of {}: {} are reduced from now on (checksum of their "
        "values {:x}; broadcast_parameters() makes those of a new layer equal)",
        name(), names_of(unknown[i]), digest));
  }
  if (!said.empty() && options_.process_set.size() > 1)
    reducers_.front()->announce(shape_of_digest(digest), joined(said, ", and "));
}

/// Parameters that the module has got since.
void ModuleReducer::take_in_new() {
  const auto named = module_->named_parameters();
  const bool are_known = std::all_of(named.begin(), named.end(), [this](const auto& item) {
    return known_.contains(item.value().unsafeGetTensorImpl());
  });
  if (are_known) return;
  for (auto& parameter : unique_parameters(named.pairs()))
    if (parameter.second.defined() && known_.insert(parameter.second.unsafeGetTensorImpl()).second)
      frozen_.push_back(std::move(parameter));
}

ModuleReducer::Named ModuleReducer::take_unfrozen() {
  Named unfrozen;
  std::erase_if(frozen_, [&unfrozen](const auto& parameter) {
    if (!parameter.second.requires_grad()) return false;
    // a DistributedOptimizer is around it
    if (GradientOwners::has_other("ddp", parameter.second)) return false;
    unfrozen.push_back(parameter);
    return true;
  });
  return unfrozen;
}

void ModuleReducer::reduce_unfrozen(const Named& unfrozen) {
  if (unfrozen.empty()) return;
  add_reducer(unfrozen, next_number(options_.process_set));
  reducers_.back()->listen(false);  // until the ranks have compared
}

// ---------------------------------------------------------------------------------------- backward

void ModuleReducer::on_output(std::uint64_t pass, bool synchronized, bool training) {
  end_failed_backward();
  const int task = get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  if (!synchronized) {
    local_task_ = task;
    return;
  }
  const bool plain = is_plain_backward();
  if (in_backward_ && task != task_ && !plain) return;
  if (!in_backward_ && std::exchange(reached_task_, task) != task) reached_.clear();
  reached_.insert(pass);
  if (in_backward_) return;
  // Gradients of inputs alone are this rank's own business. In training its pass counts also where
  // it has reached no parameter.
  const bool trains = std::any_of(reducers_.begin(), reducers_.end(), [](const auto& reducer) {
    return reducer->requires_gradients();
  });
  if (plain && training && trains) return begin_backward(task);
  if (!plain && training && !told_ && !at::GradMode::is_enabled()) tell_of_asked();
  if (!plain && !torch::autograd::get_current_graph_task_keep_graph()) outstanding_.erase(pass);
}

/// Says so if the pass, of which there is no graph, is torch::autograd::grad() of parameters.
void ModuleReducer::tell_of_asked() {
  const auto& asked = *torch::autograd::get_current_graph_task_exec_info();
  told_ = std::any_of(asked.begin(), asked.end(), [this](const auto& node) {
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.first);
    return node.second.captures_ && leaf != nullptr &&
           known_.contains(leaf->variable.unsafeGetTensorImpl());
  });
  if (told_ && options_.process_set.size() > 1)
    log(LogLevel::Warning,
        "{}: torch::autograd::grad() gives gradients of parameters that are this rank's alone, and "
        "a step by them makes the ranks differ: call backward(), or average them yourself",
        name());
}

bool ModuleReducer::takes_gradient(const std::string& name, const at::Tensor& parameter) {
  if (end_failed_backward())
    throw InvalidArgument(
        formatted("gradient of '{}': the backward pass before this one has thrown, and what is "
                  "left of its gradients may be part of this one; call forward() of the "
                  "DistributedDataParallel before the next backward()",
                  name));
  const int task = get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  // a pass within the pass (checkpointing) may add to the gradient later on
  if (in_backward_) return task == task_;
  const bool is_reached = task == reached_task_ && !reached_.empty();
  // under no_sync(), of what forward returns nothing may tell to which pass it belongs: the last
  const bool is_awaited =
      unsynchronized > 0 ? outstanding_.contains(passes_ - 1) : !outstanding_.empty();
  if (task == local_task_ || (!is_awaited && !is_reached)) {
    keep_local(name, parameter, task);
    return false;
  }
  // Within another pass this one's end reduces what is there, and the rest of the other begins
  // anew: averages of averages are the same.
  begin_backward(task);
  return true;
}

/// The gradient stays on this rank until the next pass that is reduced.
void ModuleReducer::keep_local(const std::string& parameter_name, const at::Tensor& parameter,
                               int task) {
  const bool is_meant = task == local_task_ || unsynchronized > 0;
  // Where there is another wrapper of it, the pass may be that one's.
  if (options_.process_set.size() == 1 || (!is_meant && GradientOwners::count(parameter) > 1))
    return;
  const bool is_first = std::exchange(last_local_task_, task) != task;
  const std::string* const stepped = local_ && !is_meant && is_first ? local_->changed() : nullptr;
  if (stepped != nullptr) {
    const std::string text = formatted(
        "{}: parameter '{}' has been changed by gradients of this rank alone: they come from the "
        "module itself and not from the DistributedDataParallel's forward(), so no rank averages "
        "them; call forward() of the wrapper, or make the passes under no_sync() if that is meant",
        name(), *stepped);
    local_.reset();
    throw InvalidArgument(text);
  }
  if (!is_meant && !std::exchange(told_, true))
    log(LogLevel::Warning,
        "{}: parameter '{}' has got a gradient that did not go through the "
        "DistributedDataParallel's forward(): it stays on this rank until the next pass that does; "
        "make such passes under no_sync() if that is meant",
        name(), parameter_name);
  if (!local_) local_ = std::make_unique<LocalGradients>();
  local_->note(parameter_name, parameter);
}

std::string ModuleReducer::name() const { return formatted("ddp.{}", number_); }

void ModuleReducer::begin_backward(int task) {
  if (!module_->is_training()) take_in_new();
  for (auto& parameter : take_unfrozen()) unfrozen_.push_back(std::move(parameter));
  announce_changes();
  if (reached_task_ != task) reached_.clear();  // by one that has asked for gradients of inputs
  in_backward_ = true;
  task_ = task;
  keeps_graph_ = torch::autograd::get_current_graph_task_keep_graph();
  const auto running = std::make_shared<int>();
  running_ = running;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), running, world = World::current()] {
        const WorldScope scope(world, WorldScope::kAlsoGlobal);
        if (const auto self = weak.lock()) self->end_backward(/*has_thrown=*/false);
      });
}

bool ModuleReducer::end_failed_backward() {
  {
    const std::lock_guard lock(mutex_);
    if (!in_backward_ || !running_.expired()) return false;
  }
  end_backward(/*has_thrown=*/true);
  return true;
}

/// One that has thrown has left things half done here, and the other ranks wait for the rest.
void ModuleReducer::end_backward(bool has_thrown) {
  if (has_thrown && note_joins(options_.process_set, joins_)) return begin_anew();
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(in_backward_, false)) return;
    running_.reset();
    // One that no output told of may have been but a part of a longer one (checkpointing), so it
    // counts until the next forward pass.
    if (!keeps_graph_ && reached_.empty()) ++spent_;
    if (!keeps_graph_)
      for (const auto pass : reached_) outstanding_.erase(pass);
    reached_.clear();
  }
  FirstFailure failure;
  const bool shares = std::exchange(are_buffers_own_, false);
  std::shared_ptr<SharedBuffers::Sharing> sharing;
  if (shares && !rounds_) failure.attempt([&] { sharing = buffers_.start(); });
  failure.attempt([&] { reduce_unfrozen(std::exchange(unfrozen_, {})); });
  for (std::size_t i = 1; i < agreed_; ++i) failure.attempt([&] { reducers_[i]->tell_weight(); });
  for (std::size_t i = 0; i < reducers_.size() && (!failure || i < agreed_); ++i)
    failure.attempt([&] { finish_pass(i, has_thrown); });
  const bool is_step = !failure;
  if (sharing) failure.attempt([&] { buffers_.finish(*sharing); });
  // now all of these ranks are known to train
  if (shares && rounds_ && !failure) failure.attempt([&] { buffers_.share(rounds_.get()); });
  if (shares && !failure) failure.attempt([&] { compare_kept_buffers(); });
  if (is_step) kept_->note_step();
  try {
    failure.rethrow();
  } catch (const Mismatch&) {  // tells the others; here the pass itself has thrown
    if (!has_thrown) throw;
  }
  if (has_thrown) return;
  const std::lock_guard lock(mutex_);
  local_.reset();
}

void ModuleReducer::compare_kept_buffers() {
  kept_->watch(buffers_.kept());
  kept_->begin_round();
  kept_->end_round();
}

void ModuleReducer::finish_pass(std::size_t reducer, bool has_thrown) {
  if (reducer >= agreed_) {  // as the ranks have compared with the first one's pass
    reducers_[reducer]->listen(true);
    agreed_ = reducer + 1;
  }
  reducers_[reducer]->finish_pass(has_thrown);
}

// -------------------------------------------------------------------------------------------- join

JoinGuard ModuleReducer::join(const JoinOptions& options) {
  require_current(world_, "DistributedDataParallel");
  if (reducers_.empty()) return {};
  end_failed_backward();
  if (const auto layers = sync_batchnorm_report(*module_).synchronized;
      options_.process_set.size() > 1 && !layers.empty())
    throw InvalidArgument(
        formatted("join(): the layer '{}' is a SyncBatchNorm, which needs all ranks at each step; "
                  "give all ranks as many batches, or use ordinary batch normalisation",
                  layers.front()));
  rounds_ = begin_rounds(*reducers_.front(), options);
  for (const auto& reducer : reducers_) reducer->set_join(rounds_);
  const auto share = [self = shared_from_this(), optimizer = options.optimizer](int last) {
    self->share_model(last, optimizer);
  };
  const auto end = [self = shared_from_this()] { self->end_join(); };
  return JoinGuard({rounds_, share, end});
}

void ModuleReducer::share_model(int last, torch::optim::Optimizer* optimizer) {
  broadcast_parameters(*module_, last, options_.process_set);
  if (options_.broadcast_buffers) buffers_.are_equal();
  are_buffers_own_ = false;
  if (optimizer != nullptr) broadcast_optimizer_state(*optimizer, last, options_.process_set);
}

void ModuleReducer::end_join() {
  rounds_ = nullptr;
  for (const auto& reducer : reducers_) reducer->set_join(nullptr);
  // what was unfrozen meanwhile is not known to a rank that had ended
  for (agreed_ = reducers_.size(); agreed_ > 1; --agreed_) reducers_[agreed_ - 1]->listen(false);
}

/// Forgets what was under way before all ranks have joined: it is over.
void ModuleReducer::begin_anew() {
  for (const auto& reducer : reducers_) reducer->begin_step();
  are_buffers_ahead_ = are_buffers_own_ = false;
  const std::lock_guard lock(mutex_);
  in_backward_ = false;
  spent_ = 0;
  outstanding_.clear();
  reached_.clear();
  local_.reset();
}

}  // namespace hvd::detail
