#include "torch_bindings/optimizer/master_weights.h"

#include <c10/util/ScopeExit.h>
#include <torch/torch.h>

#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/optimizer/optimizer_state.h"
#include "torch_bindings/optimizer/shared_groups.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/sharding/optimizer_shards.h"

namespace hvd {

using detail::MasterCopies;
using torch::optim::Optimizer;

namespace {

/// Returns `optimizer`, if masters may be put behind it.
Optimizer& checked_for_masters(Optimizer& optimizer) {
  if (dynamic_cast<DistributedOptimizer*>(&optimizer) != nullptr)
    throw InvalidArgument(
        "MasterWeights around a DistributedOptimizer: make the MasterWeights around the plain "
        "optimizer, and the DistributedOptimizer around the MasterWeights");
  if (detail::Wrappers::around<detail::MasterOptimizer>(optimizer) != nullptr)
    throw InvalidArgument("there is a MasterWeights around this optimizer already");
  for (const auto& group : std::as_const(optimizer).param_groups())
    for (const auto& parameter : group.params())
      if (detail::GradientOwners::has_other("ddp", parameter))
        throw InvalidArgument(
            "MasterWeights: a DistributedOptimizer is around the optimizer already; make the "
            "MasterWeights first, and wrap that");
  OptimizerShards::refuse_shares(optimizer);
  return optimizer;
}

Optimizer& checked(const std::unique_ptr<Optimizer>& optimizer) {
  if (!optimizer)
    throw InvalidArgument("MasterWeights: the std::unique_ptr to the optimizer is null");
  return *optimizer;
}

/// Returns a guard: while it lives, the optimizer's groups hold the masters.
auto lent(MasterCopies& copies, MasterCopies::Lent which) {
  copies.lend(which);
  return c10::make_scope_exit([&copies] { copies.take_back(); });
}

}  // namespace

MasterWeights::MasterWeights(Optimizer& optimizer)
    : MasterOptimizer(checked_for_masters(optimizer).param_groups(), optimizer.defaults().clone()),
      wrapped_(optimizer),
      groups_(std::make_unique<detail::SharedGroups>(param_groups_, wrapped_,
                                                     detail::SharedGroups::Named{})),
      copies_(std::make_unique<MasterCopies>(wrapped_)) {
  detail::Wrappers::add(wrapped_, *this);
}

MasterWeights::MasterWeights(std::unique_ptr<Optimizer> optimizer)
    : MasterWeights(checked(optimizer)) {
  owned_ = std::move(optimizer);
}

MasterWeights::~MasterWeights() { detail::Wrappers::remove(*this); }

at::Tensor MasterWeights::step(LossClosure closure) {
  if (const auto* const wrapper = detail::Wrappers::around<DistributedOptimizer>(*this))
    if (wrapper->process_set().included() && wrapper->process_set().size() > 1)
      throw InvalidArgument(
          "MasterWeights::step(): a DistributedOptimizer is around it, whose gradients are on "
          "their way; step that");
  param_groups();
  OptimizerShards::refuse_shares(wrapped_);
  bool was_evaluated = false;
  const auto evaluated = [&] {
    copies_->take_back();
    if (std::exchange(was_evaluated, true)) copies_->forget_factors();
    at::Tensor loss = closure();
    param_groups();
    copies_->lend(MasterCopies::Lent::OfAll);
    return loss;
  };
  at::Tensor loss;
  {
    const auto guard =
        lent(*copies_, closure ? MasterCopies::Lent::OfAll : MasterCopies::Lent::WithGradient);
    loss = wrapped_.step(closure ? LossClosure(evaluated) : nullptr);
  }
  leave_out_step();
  return loss;
}

void MasterWeights::zero_grad(bool set_to_none) {
  param_groups();
  wrapped_.zero_grad(set_to_none);
  leave_out_step();
}

void MasterWeights::leave_out_step() { copies_->forget_factors(); }

void MasterWeights::share_changes() { groups_->reconcile(); }

std::vector<torch::optim::OptimizerParamGroup>& MasterWeights::param_groups() {
  share_changes();
  return param_groups_;
}

std::vector<std::pair<at::Tensor, at::Tensor>> MasterWeights::masters() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> all;
  const auto masters = copies_->masters();
  for (const auto& group : std::as_const(wrapped_).param_groups())
    for (const auto& parameter : group.params())
      if (const auto found = masters.find(parameter.unsafeGetTensorImpl()); found != masters.end())
        all.emplace_back(parameter, found->second);
  return all;
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  const_cast<MasterWeights*>(this)->param_groups();
  OptimizerShards::refuse_shares(wrapped_);
  MasterCopies::write(archive, wrapped_, copies_->masters());
  torch::serialize::OutputArchive parts(archive.compilation_unit());
  const auto guard = lent(*copies_, MasterCopies::Lent::AsTheyAre);
  const auto unsaved = detail::save_optimizer(wrapped_, archive, parts);
  if (!unsaved.own && !unsaved.states.empty())
    throw InvalidArgument(
        formatted("{} in a MasterWeights overrides neither save nor load, and {}; override either",
                  unsaved.type, unsaved.states.front()));
  archive.write("master_parts", parts);
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  param_groups();
  OptimizerShards::refuse_shares(wrapped_);
  const auto masters = MasterCopies::read(archive, wrapped_);
  const auto undo = copies_->set_aside();
  detail::OptimizerLoad of_optimizer(wrapped_);
  try {
    copies_->adopt(masters);
    {
      const auto guard = lent(*copies_, MasterCopies::Lent::AsTheyAre);
      torch::serialize::InputArchive parts;
      const bool in_parts = archive.try_read("master_parts", parts) && !parts.keys().empty();
      of_optimizer.load(archive, in_parts ? &parts : nullptr, true);
    }
    copies_->adopt({});  // a file without masters has states of 16-bit parameters
  } catch (...) {
    of_optimizer.undo();
    undo();
    throw;
  }
  groups_->take_options();
}

}  // namespace hvd
