#include "torch_bindings/optimizer/optimizer_parts.h"

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "torch_bindings/gradients/gradient_hooks.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/reducer/reducer.h"

namespace hvd::detail {

namespace {

/// The optimizers made so far, by the world and the ranks they are on: those ranks all count alike,
/// whatever the others do, and whatever other worlds each of them is in.
int& optimizers_made(const ProcessSet& process_set) {
  static std::map<std::pair<std::uint64_t, std::vector<int>>, int> made;
  return made[{current_world_number(), process_set.ranks()}];
}

void check_adasum(const DistributedOptimizerOptions& options) {
  const auto refuse = [](const char* what) {
    throw InvalidArgument(formatted(
        "ReduceOp::Adasum combines what each rank's own step changes, so it does not go with {}",
        what));
  };
  if (options.shard_optimizer_state)
    refuse("shard_optimizer_state: no rank steps all parameters then");
  if (options.share_parameters) refuse("share_parameters: no rank has parameters of its own then");
  if (options.gradient_predivide_factor != 1)
    refuse("gradient_predivide_factor: gradients are not reduced");
  if (options.compression.needs_memory())
    refuse("int8, topk or powersgd compression; use none, fp16 or bf16");
}

void check_shards_of_gradients(const DistributedOptimizerOptions& options) {
  const auto refuse = [](const char* what) {
    throw InvalidArgument(formatted("shard_gradients does not go with {}", what));
  };
  if (options.op == ReduceOp::Adasum) refuse("ReduceOp::Adasum: gradients are not reduced then");
  if (options.share_parameters) refuse("share_parameters: use one of them");
  if (options.compression.needs_memory())
    refuse(
        "int8, topk or powersgd compression, which remembers all gradients on every rank; use "
        "none, fp16 or bf16");
}

void check(const DistributedOptimizerOptions& options) {
  require_running();
  require_current_world(options.process_set);
  if (options.shard_gradients) check_shards_of_gradients(options);
  if (options.backward_passes_per_step < 1)
    throw InvalidArgument(formatted("backward_passes_per_step is {}; it must be at least 1",
                                    options.backward_passes_per_step));
  if (options.op == ReduceOp::Adasum) check_adasum(options);
  if (options.op != ReduceOp::Average && options.op != ReduceOp::Sum &&
      options.op != ReduceOp::Adasum)
    throw InvalidArgument(formatted("gradients cannot be reduced by {}: use average, sum or adasum",
                                    name_of(options.op)));
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::Average)
    throw InvalidArgument("gradient_predivide_factor goes with ReduceOp::Average only");
  if (!(options.gradient_predivide_factor > 0))
    throw InvalidArgument(formatted("gradient_predivide_factor is {}; it must be greater than 0",
                                    options.gradient_predivide_factor));
}

/// Returns the options that hold: shards of gradients imply those of the state.
DistributedOptimizerOptions checked(DistributedOptimizerOptions options, bool has_masters) {
  check(options);
  if (options.shard_gradients) options.shard_optimizer_state = true;
  if (has_masters && options.op == ReduceOp::Adasum)
    throw InvalidArgument(
        "ReduceOp::Adasum combines what each rank's own step changes in the 16-bit parameters, so "
        "it does not go with MasterWeights");
  return options;
}

std::vector<GradientReducer::Named> from(const OptimizerParts::Named& parameters,
                                         std::size_t first) {
  std::vector<GradientReducer::Named> named;
  for (std::size_t i = first; i < parameters.size(); ++i)
    named.push_back({parameters[i].first, parameters[i].second});
  return named;
}

/// Returns the optimizer, if no wrapper has its state in shares.
torch::optim::Optimizer& whole(torch::optim::Optimizer& optimizer) {
  OptimizerShards::refuse_shares(optimizer);
  return optimizer;
}

bool is_reduced(const ProcessSet& process_set) {
  return process_set.included() && process_set.size() > 1;
}

}  // namespace

OptimizerParts::OptimizerParts(torch::optim::Optimizer& of, Groups& mine, MasterOptimizer* around,
                               torch::optim::Optimizer& inner, const Named& named,
                               DistributedOptimizerOptions given)
    : wrapper(&of),
      masters(around),
      wrapped(inner),
      options(checked(std::move(given), around != nullptr)),
      watch(is_reduced(options.process_set) ? std::make_shared<StepWatch>(inner) : nullptr),
      groups(mine, whole(inner), named),
      reducers(groups, watch) {
  if (options.process_set.included()) begin();
  Wrappers::add(wrapped, of);
  if (masters != nullptr) Wrappers::add(*masters, of);
}

OptimizerParts::~OptimizerParts() {
  for (const auto& reducer : reducers.all()) reducer->unhook();
  Wrappers::remove(*wrapper);
}

/// Does what a rank of the process set does besides.
void OptimizerParts::begin() {
  GradientOwners::refuse_others("optimizer", groups.parameters());
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  int& number = optimizers_made(options.process_set);
  number_ = number;
  take_in(0);
  // not before: one that is refused on some ranks only must not put their numbers out of step
  ++number;
  options.groups = {};  // they are of the parameters from the start
}

void OptimizerParts::follow(torch::optim::Optimizer& now, Groups& mine) noexcept {
  groups.follow(mine);
  Wrappers::move(*wrapper, now);
  wrapper = &now;
}

void OptimizerParts::take_in(std::size_t first) {
  const auto& parameters = groups.parameters();
  const std::string name = formatted("optimizer.{}", number_);
  if (options.op == ReduceOp::Adasum) {
    if (!deltas)
      deltas = std::make_unique<AdasumDeltas>(
          AdasumDeltas::Terms{.compression = options.compression,
                              .process_set = options.process_set,
                              .name = name,
                              .passes = options.backward_passes_per_step,
                              .replicas = groups.terms(),
                              .witness = watch});
    return deltas->add(parameters, first);
  }
  Named stepped(parameters.begin() + static_cast<std::ptrdiff_t>(first), parameters.end());
  std::erase_if(stepped, [](const auto& named) { return !gets_gradients(named.second); });
  const std::string part = first == 0 ? "" : formatted("/added.{}", reducers.size());
  auto reducer =
      std::make_shared<GradientReducer>(from(parameters, first), options, number_, "optimizer",
                                        GradientReducer::Taking::ByDevice, part);
  const auto runs = options.shard_gradients ? reducer->parameters_by_bucket() : ShardRuns{};
  if (shards) {
    shards->add(stepped, 0, runs);
  } else if (options.shard_optimizer_state || options.share_parameters) {
    shards = std::make_unique<OptimizerShards>(wrapped, options.process_set, name, stepped,
                                               options.share_parameters, master_copies(), runs);
  }
  if (shards_gradients()) reducer->keep_shares(&shards->keep_gradients());
  reducers.add(std::move(reducer));
}

OptimizerParts& OptimizerParts::reconciled() {
  if (masters != nullptr) masters->share_changes();
  const std::size_t known = groups.parameters().size();
  if (groups.reconcile() && !is_local()) {
    try {
      take_over_changes(known);
    } catch (...) {
      groups.forget_from(known);
      throw;
    }
    reducers.note_change();
  }
  if (shards) shards->check_untouched();
  return *this;
}

void OptimizerParts::take_over_changes(std::size_t known) {
  if (known < groups.parameters().size()) {
    GradientOwners::refuse_others("optimizer", groups.parameters(), known);
    take_in(known);
  } else if (shards) {
    shards->add(groups.parameters(), known);
  }
}

void OptimizerParts::note_state() const {
  if (watch) watch->attend();
}

void OptimizerParts::refuse_own_step() const {
  if (watch) watch->refuse_step(groups.parameters());
}

void OptimizerParts::begin_step() {
  note_state();
  for (const auto& reducer : reducers.all()) reducer->begin_step();
  if (deltas) deltas->begin_step();
  if (masters != nullptr) masters->leave_out_step();
  if (shards_gradients()) shards->gradients().drop_all();
}

}  // namespace hvd::detail
