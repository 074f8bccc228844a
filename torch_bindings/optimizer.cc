#include "torch_bindings/optimizer.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "hvd/text.h"
#include "torch_bindings/optimizer_shards.h"
#include "torch_bindings/reducer.h"

namespace hvd {

namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

/// The optimizers made so far, by the ranks they are on: those ranks all count alike, whatever the others do.
int& optimizers_made(const ProcessSet& process_set) {
  static std::map<std::vector<int>, int> made;
  return made[process_set.ranks()];
}

void check(const DistributedOptimizerOptions& options) {
  if (options.backward_passes_per_step < 1)
    throw InvalidArgument(formatted("backward_passes_per_step is {}; it must be at least 1", options.backward_passes_per_step));
  if (options.op != ReduceOp::Average && options.op != ReduceOp::Sum)
    throw InvalidArgument(formatted("gradients cannot be reduced by {}: use average or sum", name_of(options.op)));
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::Average)
    throw InvalidArgument("gradient_predivide_factor goes with ReduceOp::Average only");
  if (!(options.gradient_predivide_factor > 0))
    throw InvalidArgument(formatted("gradient_predivide_factor is {}; it must be greater than 0", options.gradient_predivide_factor));
}

std::vector<GradientReducer::Named> name_parameters(torch::optim::Optimizer& wrapped,
                                                    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters) {
  std::unordered_map<const void*, std::string> names;
  std::set<std::string> used;
  for (const auto& [name, parameter] : named_parameters) {
    if (!used.insert(name).second) throw InvalidArgument(formatted("named_parameters: the name '{}' is given twice", name));
    names[parameter.unsafeGetTensorImpl()] = name;
  }
  std::vector<GradientReducer::Named> parameters;
  std::set<const void*> seen;
  for (std::size_t g = 0; g < wrapped.param_groups().size(); ++g) {
    const auto& group = wrapped.param_groups()[g].params();
    for (std::size_t p = 0; p < group.size(); ++p) {
      const void* key = group[p].unsafeGetTensorImpl();
      const auto name = names.find(key);
      if (!named_parameters.empty() && name == names.end())
        throw InvalidArgument(
            formatted("named_parameters: parameter {} of group {} (shape {}) has no name", p, g, to_string(Shape(group[p].sizes().vec()))));
      if (!seen.insert(key).second) throw InvalidArgument(formatted("parameter {} of group {} is in the optimizer twice", p, g));
      parameters.push_back({name == names.end() ? formatted("parameter.{}.{}", g, p) : name->second, group[p]});
    }
  }
  return parameters;
}

template <class Options>
bool typed_equal(const OptimizerOptions& a, const OptimizerOptions& b, bool& known) {
  const auto* left = dynamic_cast<const Options*>(&a);
  const auto* right = dynamic_cast<const Options*>(&b);
  if (left == nullptr || right == nullptr) return false;
  known = true;
  return *left == *right;
}

template <class... Options>
bool any_equal(const OptimizerOptions& a, const OptimizerOptions& b, bool& known) {
  return (typed_equal<Options>(a, b, known) || ...);
}

/// LibTorch's own options are compared whole, those of a user's optimizer by their learning rate.
bool equal(const OptimizerOptions& a, const OptimizerOptions& b) {
  bool known = false;
  const bool same = any_equal<torch::optim::SGDOptions, torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::RMSpropOptions,
                              torch::optim::AdagradOptions, torch::optim::LBFGSOptions>(a, b, known);
  if (known) return same;
  try {
    return a.get_lr() == b.get_lr();
  } catch (const c10::Error&) {
    return true;  // it has none
  }
}

template <class Options>
bool typed_assign(OptimizerOptions& to, const OptimizerOptions& from) {
  auto* target = dynamic_cast<Options*>(&to);
  const auto* source = dynamic_cast<const Options*>(&from);
  if (target == nullptr || source == nullptr) return false;
  *target = *source;
  return true;
}

template <class... Options>
bool any_assign(OptimizerOptions& to, const OptimizerOptions& from) {
  return (typed_assign<Options>(to, from) || ...);
}

/// In place: users hold references to options.
void assign(OptimizerOptions& to, const OptimizerOptions& from) {
  if (!any_assign<torch::optim::SGDOptions, torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::RMSpropOptions,
                  torch::optim::AdagradOptions, torch::optim::LBFGSOptions>(to, from))
    to.set_lr(from.get_lr());
}

}  // namespace

void detail::drop_scratch(torch::optim::Optimizer& optimizer) {
  for (auto& [parameter, state] : optimizer.state())
    if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(state.get())) lbfgs->al(std::nullopt);
}

DistributedOptimizer::DistributedOptimizer(torch::optim::Optimizer& wrapped,
                                           std::vector<std::pair<std::string, at::Tensor>> named_parameters,
                                           DistributedOptimizerOptions options)
    : Optimizer(wrapped.param_groups(), wrapped.defaults().clone()), wrapped_(wrapped) {
  check(options);
  for (const auto& group : wrapped_.param_groups()) shared_options_.push_back(group.options().clone());
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  auto parameters = name_parameters(wrapped_, named_parameters);
  GradientReducer::refuse_twice(parameters, "optimizer");
  int& number = optimizers_made(options.process_set);
  reducer_ = std::make_shared<GradientReducer>(std::move(parameters), options, number);
  if (options.shard_optimizer_state)
    shards_ = std::make_unique<OptimizerShards>(wrapped_, options.process_set, formatted("optimizer.{}", number));
  ++number;  // not before: one that is refused on some ranks only must not put their numbers out of step
  reducer_->hook();
}

DistributedOptimizer::~DistributedOptimizer() { reducer_->unhook(); }

void DistributedOptimizer::share_options() {
  for (std::size_t i = 0; i < shared_options_.size(); ++i) {
    OptimizerOptions& mine = param_groups_[i].options();
    OptimizerOptions& theirs = wrapped_.param_groups()[i].options();
    if (!equal(mine, *shared_options_[i])) {
      assign(theirs, mine);
    } else if (!equal(theirs, *shared_options_[i])) {
      assign(mine, theirs);
    } else {
      continue;
    }
    shared_options_[i] = mine.clone();
  }
}

void DistributedOptimizer::synchronize() {
  share_options();
  reducer_->synchronize();
}

void DistributedOptimizer::synchronize_once() {
  if (skips_ == 0 && !reducer_->is_synchronized()) synchronize();
}

void DistributedOptimizer::leave_out_step() { reducer_->begin_step(); }

at::Tensor DistributedOptimizer::step(LossClosure closure) {
  share_options();
  at::Tensor loss;
  if (closure) {
    // An optimizer may decide by the loss (LBFGS): it gets that of all ranks, so that all decide alike. The user gets this rank's own.
    std::vector<std::pair<at::Tensor, at::Tensor>> losses;
    loss = wrapped_.step([&] {
      if (skips_ == 0) reducer_->begin_evaluation();
      const at::Tensor own = closure();
      if (skips_ == 0) reducer_->synchronize();
      if (shards_) shards_->lend_gradients();
      if (skips_ > 0) return own;
      if (!own.defined()) return own;
      losses.emplace_back(reducer_->reduce_loss(own), own);
      return losses.back().first;
    });
    const auto mine = std::find_if(losses.begin(), losses.end(), [&](const auto& both) { return loss.is_same(both.first); });
    if (mine != losses.end()) loss = mine->second;
  } else {
    synchronize_once();
    if (shards_) shards_->lend_gradients();
    loss = wrapped_.step();
  }
  if (shards_) shards_->share_parameters();
  reducer_->begin_step();
  return loss;
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  reducer_->settle();
  shards_ ? Optimizer::zero_grad(set_to_none) : wrapped_.zero_grad(set_to_none);
}

void DistributedOptimizer::set_backward_passes_per_step(int passes) {
  if (passes < 1) throw InvalidArgument(formatted("backward_passes_per_step is {}; it must be at least 1", passes));
  reducer_->set_passes(passes);
}

std::vector<OptimizerParamGroup>& DistributedOptimizer::param_groups() {
  share_options();
  return param_groups_;
}

ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& DistributedOptimizer::state() { return wrapped_.state(); }

std::vector<at::Tensor> DistributedOptimizer::compression_memory() const { return reducer_->compression_memory(); }

std::uint64_t DistributedOptimizer::bytes_sent() const { return reducer_->bytes_sent(); }

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const_cast<DistributedOptimizer*>(this)->share_options();
  detail::drop_scratch(wrapped_);
  shards_ ? shards_->save(archive) : wrapped_.save(archive);
}

void DistributedOptimizer::load(torch::serialize::InputArchive& archive) {
  shards_ ? shards_->load(archive) : wrapped_.load(archive);
  for (std::size_t i = 0; i < shared_options_.size(); ++i) {
    assign(param_groups_[i].options(), wrapped_.param_groups()[i].options());
    shared_options_[i] = wrapped_.param_groups()[i].options().clone();
  }
}

}  // namespace hvd
