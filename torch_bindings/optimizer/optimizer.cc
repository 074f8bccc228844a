#include "torch_bindings/optimizer/optimizer.h"

#include <c10/util/ScopeExit.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/optimizer/optimizer_parts.h"
#include "torch_bindings/optimizer/shared_options.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/precision/state_parts.h"
#include "torch_bindings/reducer/reducer.h"

namespace hvd {

namespace {

using detail::OptimizerParts;
using torch::optim::OptimizerParamGroup;
using LossClosure = torch::optim::Optimizer::LossClosure;

/// Returns the optimizer that a wrapper steps.
torch::optim::Optimizer& without_masters(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<DistributedOptimizer*>(&optimizer) != nullptr)
    throw InvalidArgument(
        "a DistributedOptimizer around a DistributedOptimizer: make one, around the optimizer "
        "itself");
  auto* const masters = detail::Wrappers::around<detail::MasterOptimizer>(optimizer);
  if (masters == nullptr) return optimizer;
  masters->share_changes();
  return masters->wrapped();
}

constexpr const char* kMoved =
    "this DistributedOptimizer was moved: use the one that it was moved into, and make schedulers "
    "after that, or on its wrapped()";

/// The options of the one group left where a wrapper was: a scheduler made there meets them.
struct MovedOptions : torch::optim::OptimizerCloneableOptions<MovedOptions> {
  [[nodiscard]] double get_lr() const override { throw InvalidArgument(kMoved); }
  void set_lr(double /*rate*/) override { throw InvalidArgument(kMoved); }
};

/// Leaves one group where a wrapper was.
void leave_moved(std::vector<OptimizerParamGroup>& groups) {
  groups.clear();
  groups.emplace_back(std::vector<at::Tensor>{}, std::make_unique<MovedOptions>());
}

torch::optim::Optimizer& checked_wrapped(
    const std::unique_ptr<torch::optim::Optimizer>& optimizer) {
  if (!optimizer)
    throw InvalidArgument("DistributedOptimizer: the std::unique_ptr to the optimizer is null");
  return *optimizer;
}

/// Before an InvalidArgument that is this rank's alone: `call` lets the others know in what they do
/// next, where they would wait for it.
template <class Call>
void refuse(const Call& call) {
  try {
    call();
  } catch (const Mismatch&) {  // they know
  }
}

/// Steps the wrapped optimizer without gradients to wait for. Meanwhile its groups are this rank's
/// pieces, if it is sharded, or the masters, if there are any. Whatever it throws, the other ranks
/// do not wait for this one's share.
at::Tensor step_wrapped(OptimizerParts& parts, const LossClosure& closure = nullptr) {
  using Which = detail::MasterCopies::Lent;
  OptimizerShards* const shards = parts.shards.get();
  detail::MasterCopies* const masters = shards != nullptr ? nullptr : parts.master_copies();
  try {
    if (shards != nullptr) shards->lend();
    if (masters != nullptr) masters->lend(closure ? Which::OfAll : Which::WithGradient);
    const auto take_back = c10::make_scope_exit([&] {
      if (shards != nullptr) shards->take_back();
      if (masters != nullptr) masters->take_back();
    });
    return parts.wrapped.step(closure);
  } catch (...) {
    if (parts.shards)
      refuse([&] { parts.shards->fail_update(detail::words_of_current_exception()); });
    throw;
  }
}

/// Steps with a closure. An optimizer may decide by the loss (LBFGS): it gets that of all ranks, so
/// that all decide alike. The user gets this rank's own.
at::Tensor step_with_closure(OptimizerParts& parts, const LossClosure& closure) {
  std::vector<std::pair<at::Tensor, at::Tensor>> losses;
  bool was_evaluated = false;
  const at::Tensor loss = step_wrapped(parts, [&] {
    if (parts.shards) parts.shards->interrupt_update();
    if (parts.masters != nullptr) {
      parts.master_copies()->take_back();
      // clipping was of the last evaluation's gradients
      if (std::exchange(was_evaluated, true)) parts.masters->leave_out_step();
    }
    if (*parts.skips == 0)
      for (const auto& reducer : parts.reducers.all()) reducer->begin_evaluation();
    const at::Tensor own = closure();
    try {
      if (*parts.skips == 0) parts.reconciled().reducers.reduce(true);
    } catch (const InvalidArgument& error) {
      if (own.defined())
        refuse([&] { static_cast<void>(parts.reducers.first().reduce_loss(own, error.what())); });
      throw;
    }
    if (*parts.skips == 0 && own.defined())
      losses.emplace_back(parts.reducers.first().reduce_loss(own), own);
    if (parts.shards) parts.shards->resume_update();
    if (parts.masters != nullptr && !parts.shards)
      parts.master_copies()->lend(detail::MasterCopies::Lent::OfAll);
    return *parts.skips > 0 || !own.defined() ? own : losses.back().first;
  });
  const auto mine = std::find_if(losses.begin(), losses.end(),
                                 [&](const auto& both) { return loss.is_same(both.first); });
  return mine != losses.end() ? mine->second : loss;
}

/// Steps with ReduceOp::Adasum. What only this rank throws it throws when the others know.
at::Tensor step_by_deltas(OptimizerParts& parts, const LossClosure& closure) {
  const LossClosure counted = [&] {
    const at::Tensor own = closure();
    parts.deltas->begin_step();  // an optimizer may evaluate it often
    parts.note_state();
    return own;
  };
  if (parts.options.process_set.size() == 1) {
    parts.deltas->begin_step();
    return parts.wrapped.step(closure ? counted : nullptr);
  }
  detail::FirstFailure failure;
  std::string words;
  const auto note = [&] {
    failure.note();
    words = detail::words_of_current_exception();
  };
  try {
    parts.refuse_own_step();
  } catch (const InvalidArgument&) {
    note();
  }
  try {
    parts.deltas->remember();
  } catch (...) {
    failure.rethrow();
    throw;
  }
  at::Tensor loss;
  try {
    if (!failure) loss = parts.wrapped.step(closure ? counted : nullptr);
  } catch (const Deadlock&) {  // the others are somewhere else
    parts.deltas->put_back();
    parts.note_state();
    throw;
  } catch (...) {
    note();
  }
  failure.attempt([&] { parts.deltas->combine(words); });
  parts.note_state();
  failure.rethrow();
  parts.deltas->begin_step();
  return loss;
}

}  // namespace

void detail::drop_scratch(torch::optim::Optimizer& optimizer) {
  for (auto& [parameter, state] : optimizer.state())
    if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(state.get()))
      lbfgs->al(std::nullopt);
}

DistributedOptimizer::DistributedOptimizer(
    torch::optim::Optimizer& wrapped,
    std::vector<std::pair<std::string, at::Tensor>> named_parameters,
    DistributedOptimizerOptions options)
    : Optimizer(without_masters(wrapped).param_groups(), wrapped.defaults().clone()),
      parts_(std::make_shared<OptimizerParts>(
          *this, param_groups_, detail::Wrappers::around<detail::MasterOptimizer>(wrapped),
          without_masters(wrapped), named_parameters, std::move(options))) {}

DistributedOptimizer::DistributedOptimizer(
    std::unique_ptr<torch::optim::Optimizer> wrapped,
    std::vector<std::pair<std::string, at::Tensor>> named_parameters,
    DistributedOptimizerOptions options)
    : DistributedOptimizer(checked_wrapped(wrapped), std::move(named_parameters),
                           std::move(options)) {
  parts_->owned = std::move(wrapped);
}

DistributedOptimizer::~DistributedOptimizer() { parts_.reset(); }

DistributedOptimizer::DistributedOptimizer(DistributedOptimizer&& other) noexcept
    : Optimizer(std::move(other)), parts_(std::move(other.parts_)) {
  leave_moved(other.param_groups_);
  if (parts_) parts_->follow(*this, param_groups_);
}

DistributedOptimizer& DistributedOptimizer::operator=(DistributedOptimizer&& other) noexcept {
  if (this == &other) return *this;
  parts_.reset();
  Optimizer::operator=(std::move(other));
  parts_ = std::move(other.parts_);
  leave_moved(other.param_groups_);
  if (parts_) parts_->follow(*this, param_groups_);
  return *this;
}

/// Throws where this has been moved away.
OptimizerParts& DistributedOptimizer::parts() const {
  if (!parts_) throw InvalidArgument(kMoved);
  require_current(parts_->world, "DistributedOptimizer");
  return *parts_;
}

void DistributedOptimizer::synchronize() { parts().reconciled().reducers.reduce(true); }

void DistributedOptimizer::synchronize_once() {
  OptimizerParts& parts = this->parts().reconciled();
  if (*parts.skips == 0) parts.reducers.reduce(false);
}

void DistributedOptimizer::check_replicas() {
  OptimizerParts& parts = this->parts().reconciled();
  if (parts.is_local()) return;
  // first, as a group that some ranks lack has a reducer, which compares, on the others alone
  detail::Statements mine{{"parameters in each group", to_string(parts.groups.layout())}};
  for (const auto& reducer : parts.reducers.all())
    for (const auto& [name, parameter] : reducer->parameters())
      mine.emplace_back(formatted("parameter '{}'", name), to_string(parameter.sizes().vec()));
  detail::agree_on("check_replicas", mine, parts.options.process_set);
  for (const auto& reducer : parts.reducers.all()) reducer->check_replicas();
  if (parts.deltas) parts.deltas->check_replicas();
}

void DistributedOptimizer::leave_out_step() { parts().begin_step(); }

at::Tensor DistributedOptimizer::step(LossClosure closure) {
  OptimizerParts& parts = this->parts().reconciled();
  if (parts.is_local()) return wrapped().step(std::move(closure));
  if (parts.deltas) return step_by_deltas(parts, closure);
  at::Tensor loss;
  if (closure) {
    loss = step_with_closure(parts, closure);
  } else {
    try {
      if (*parts.skips == 0) parts.reducers.reduce(false);
    } catch (const InvalidArgument& error) {
      if (parts.shards) refuse([&] { parts.shards->begin_update(error.what()); });
      throw;
    }
    if (parts.shards) parts.shards->begin_update();
    loss = step_wrapped(parts);
  }
  if (parts.shards) parts.shards->end_update();
  parts.begin_step();  // what comes next is new
  return loss;
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  OptimizerParts& parts = this->parts().reconciled();
  parts.reducers.settle();
  if (parts.deltas) parts.deltas->begin_step();
  if (parts.masters != nullptr) parts.masters->leave_out_step();
  if (parts.shards_gradients()) parts.shards->gradients().zero(set_to_none);
  detail::FirstFailure stepped;  // thrown when the others have what they wait for
  stepped.attempt([&] { parts.refuse_own_step(); });
  parts.wrapped.zero_grad(set_to_none);
  stepped.rethrow();
}

void DistributedOptimizer::set_backward_passes_per_step(int passes) {
  OptimizerParts& parts = this->parts();
  if (passes < 1)
    throw InvalidArgument(
        formatted("backward_passes_per_step is {}; it must be at least 1", passes));
  parts.options.backward_passes_per_step = passes;
  for (const auto& reducer : parts.reducers.all()) reducer->set_passes(passes);
  if (parts.deltas) parts.deltas->set_passes(passes);
}

void DistributedOptimizer::set_weight(double n) {
  OptimizerParts& parts = this->parts();
  detail::check_weight(n);
  if (parts.options.op != ReduceOp::Average)
    throw InvalidArgument(
        formatted("set_weight() goes with ReduceOp::Average: by {} every rank counts as it is",
                  name_of(parts.options.op)));
  parts.reducers.set_weight(n);
}

void DistributedOptimizer::unshard() {
  OptimizerParts& parts = this->parts().reconciled();
  if (!parts.shards) return;
  const bool of_gradients = parts.shards_gradients();
  const auto& reducers = parts.reducers.all();
  const bool has_some = of_gradients && (!parts.shards->gradients().all().empty() ||
                                         std::any_of(reducers.begin(), reducers.end(),
                                                     [](const auto& r) { return r->has_begun(); }));
  if (of_gradients && any(has_some, process_set()))
    throw InvalidArgument(
        "unshard(): the gradients are in shares, or on their way; call step() or the optimizer's "
        "zero_grad() before");
  parts.shards->give_back();
  if (of_gradients) {
    for (const auto& reducer : reducers) reducer->keep_shares(nullptr);
    parts.shards->gradients().leave_zeros();
  }
  parts.shards.reset();
  parts.options.shard_optimizer_state = parts.options.share_parameters =
      parts.options.shard_gradients = false;
}

DistributedOptimizer::SkipSynchronize::SkipSynchronize(DistributedOptimizer& optimizer)
    : skips_(optimizer.parts().skips) {
  ++*skips_;
}

DistributedOptimizer::ParameterWriting::ParameterWriting(DistributedOptimizer& optimizer) {
  OptimizerParts& parts = optimizer.parts().reconciled();
  if (parts.shares_parameters()) parts.shards->begin_update();
  parts_ = optimizer.parts_;
}

DistributedOptimizer::ParameterWriting::~ParameterWriting() {
  try {
    if (const auto parts = parts_.lock(); parts && parts->shares_parameters())
      parts->shards->end_update();
  } catch (const Error&) {  // the world has ended or failed, as its next operation says
  }
}

bool DistributedOptimizer::ParameterWriting::is_writer() const {
  const auto parts = parts_.lock();
  return !parts || !parts->shards || parts->shards->is_writer();
}

const ProcessSet& DistributedOptimizer::process_set() const { return parts().options.process_set; }

bool DistributedOptimizer::is_sharded() const { return parts().shards != nullptr; }

bool DistributedOptimizer::shards_gradients() const { return parts().shards_gradients(); }

bool DistributedOptimizer::shares_parameters() const { return parts().shares_parameters(); }

std::vector<std::pair<std::string, at::Tensor>> DistributedOptimizer::gradient_shares() {
  if (!shards_gradients()) return {};
  return parts().shards->gradients().all();
}

std::vector<OptimizerParamGroup>& DistributedOptimizer::param_groups() {
  parts().reconciled();
  return param_groups_;
}

ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>&
DistributedOptimizer::state() {
  return parts().wrapped.state();
}

torch::optim::Optimizer& DistributedOptimizer::wrapped() {
  OptimizerParts& parts = this->parts();
  return parts.masters != nullptr ? static_cast<torch::optim::Optimizer&>(*parts.masters)
                                  : parts.wrapped;
}

detail::MasterCopies* DistributedOptimizer::master_copies() const {
  return parts().master_copies();
}

void DistributedOptimizer::note_state() { parts().note_state(); }

std::vector<std::vector<std::string>> DistributedOptimizer::names_by_group() {
  std::map<const void*, std::string> names;
  for (const auto& [name, parameter] : parts().reconciled().groups.parameters())
    names[parameter.unsafeGetTensorImpl()] = name;
  std::vector<std::vector<std::string>> all;
  for (const auto& group : param_groups_) {
    auto& of_group = all.emplace_back();
    for (const auto& parameter : group.params())
      if (const auto node = names.extract(parameter.unsafeGetTensorImpl()))
        of_group.push_back(node.mapped());
  }
  return all;
}

std::function<void()> DistributedOptimizer::remember_masters() {
  return parts().shards->remember_masters();
}

std::vector<at::Tensor> DistributedOptimizer::compression_memory() const {
  return parts().reducers.compression_memory();
}

std::vector<at::Tensor> DistributedOptimizer::state_of_rank() const {
  const OptimizerParts& parts = this->parts();
  std::vector<at::Tensor> tensors;
  if (parts.options.op != ReduceOp::Adasum || parts.is_local()) return tensors;
  const auto& states = parts.wrapped.state();
  for (const auto& [name, parameter] : parts.groups.parameters()) {
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    if (found == states.end() || !found->second) continue;
    for (const at::Tensor* const tensor : detail::parts_of(*found->second).tensors)
      if (tensor->defined()) tensors.push_back(*tensor);
  }
  return tensors;
}

std::uint64_t DistributedOptimizer::bytes_sent() const {
  std::uint64_t bytes = 0;
  for (const auto& reducer : parts().reducers.all()) bytes += reducer->bytes_sent();
  return bytes;
}

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  OptimizerParts& parts = this->parts().reconciled();
  detail::drop_scratch(parts.wrapped);
  if (parts.shards) return parts.shards->save(archive);
  parts.masters != nullptr ? parts.masters->save(archive) : parts.wrapped.save(archive);
}

void DistributedOptimizer::save_on(int rank, torch::serialize::OutputArchive& archive) {
  parts().reconciled().shards->save(archive, rank);
}

void DistributedOptimizer::load(torch::serialize::InputArchive& archive) {
  load_unread(archive, nullptr);
}

void DistributedOptimizer::load_unread(torch::serialize::InputArchive& archive,
                                       detail::CheckpointReader* reader) {
  OptimizerParts& parts = this->parts().reconciled();
  const auto load_wrapped = [&] {
    if (parts.masters != nullptr) {
      const detail::RepeatedParameters each_once(parts.wrapped,
                                                 detail::RepeatedParameters::Places::LeftOut);
      return parts.wrapped.load(archive);
    }
    detail::load_state(parts.wrapped, archive);
  };
  if (parts.shards) {
    const detail::KeptOptions options(parts.wrapped);
    try {
      parts.shards->load(load_wrapped, archive, reader);
    } catch (...) {
      options.restore();
      throw;
    }
  } else {
    parts.masters != nullptr ? parts.masters->load(archive) : load_wrapped();
  }
  parts.groups.take_options();
  parts.note_state();
}

}  // namespace hvd
