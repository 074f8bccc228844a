#include "torch_bindings/optimizer/grad_scaler.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/gradients/compressor.h"
#include "torch_bindings/gradients/gradient_owners.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/precision/master_optimizer.h"

namespace hvd {

using torch::optim::Optimizer;

namespace {

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

/// By which an optimizer is known between `unscale_` and `update`: a wrapper may be moved.
const Optimizer* key_of(Optimizer& optimizer) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  return distributed != nullptr ? &distributed->wrapped() : &optimizer;
}

detail::MasterCopies* masters_of(Optimizer& optimizer) {
  if (auto* const masters = dynamic_cast<detail::MasterOptimizer*>(&optimizer))
    return &masters->copies();
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  return distributed != nullptr ? distributed->master_copies() : nullptr;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)) {
  if (!options_.enabled) return;
  if (!(options_.growth_factor > 1))
    throw InvalidArgument(
        formatted("growth_factor is {}; it must be greater than 1", options_.growth_factor));
  if (!(options_.backoff_factor < 1))
    throw InvalidArgument(
        formatted("backoff_factor is {}; it must be less than 1", options_.backoff_factor));
}

void GradScaler::start() {
  if (scale_ == nullptr) scale_ = std::make_shared<float>(static_cast<float>(options_.init_scale));
}

/// Multiplied by a tensor, as in PyTorch, a loss of 16 bits becomes one of 32. The tensor is made
/// where and when it is used, on the stream that is current.
at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  start();
  return loss * at::full({}, *scale_, at::TensorOptions(at::kFloat).device(loss.device()));
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::check_scaled(const char* what) const {
  if (scale_ == nullptr)
    throw InvalidArgument(formatted("GradScaler: {} before any scale(loss)", what));
}

/// Multiplies all gradients, or none where it refuses one. Returns the sum of what was found on
/// each device; undefined if there are no gradients.
at::Tensor GradScaler::multiply(Optimizer& optimizer, double factor) {
  const at::NoGradGuard no_gradient;
  std::map<std::tuple<std::string, at::ScalarType, bool>, std::vector<at::Tensor>> by_kind;
  auto* const masters = masters_of(optimizer);
  // whose 16-bit gradients are looked at here, and divided in fp32 later
  std::vector<at::Tensor> with_master;
  std::set<const void*> seen;  // a group may list a parameter twice (tied weights)
  const auto refuse_others = [](const at::Tensor& gradient) {
    if (gradient.scalar_type() == at::kHalf)
      throw InvalidArgument(
          "GradScaler: fp16 gradients cannot be unscaled; keep parameters in fp32, or a "
          "MasterWeights around the optimizer");
    const auto type = gradient.scalar_type();
    if ((type != at::kFloat && type != at::kDouble && type != at::kBFloat16) ||
        (gradient.layout() != at::kStrided && !gradient.is_sparse()))
      throw InvalidArgument(
          formatted("GradScaler: a gradient of type {} and layout {} cannot be unscaled",
                    at::toString(type), c10::str(gradient.layout())));
  };
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const bool has_master = masters != nullptr && detail::MasterCopy::is_for(parameter);
      if (has_master) {
        static_cast<void>(masters->wide(parameter, at::empty({0})));  // throws if it was changed
        with_master.push_back(parameter);
      } else {
        refuse_others(gradient);
      }
      const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
      by_kind[{values.device().str(), values.scalar_type(), has_master}].push_back(values);
    }
  }
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer)) {
    for (const auto& [name, share] : distributed->gradient_shares()) {
      refuse_others(share);
      by_kind[{share.device().str(), share.scalar_type(), false}].push_back(share);
    }
  }
  const auto all = static_cast<float>(factor);
  std::map<std::string, at::Tensor> found_on;
  for (const auto& [kind, gradients] : by_kind) {
    const auto options = at::TensorOptions(at::kFloat).device(gradients.front().device());
    at::Tensor& found_here = found_on[std::get<std::string>(kind)];
    if (!found_here.defined()) found_here = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(
        gradients, found_here, at::full({}, std::get<bool>(kind) ? 1.0F : all, options));
  }
  at::Tensor found;
  for (const auto& [device, here] : found_on)
    found = found.defined() ? found + here.to(found.device(), /*non_blocking=*/true) : here;
  for (const auto& parameter : with_master) masters->multiply(parameter, all);
  return found;
}

/// Asks the device, once.
bool GradScaler::read(Record& record) {
  if (record.unread.defined()) record.has_overflowed = record.unread.item<float>() != 0;
  record.unread.reset();
  return record.has_overflowed;
}

namespace {
AllreduceOptions terms(const ProcessSet& process_set) {
  return {.name = library_name("grad_scaler/overflow"),
          .op = ReduceOp::Max,
          .process_set = process_set};
}
}  // namespace

bool GradScaler::agrees_with(const ProcessSet& process_set) const {
  return options_.agree && is_initialized() && process_set.size() > 1;
}

/// The others, who wait for this rank to agree, get a Mismatch.
void GradScaler::refuse(const ProcessSet& process_set, const std::string& why) const {
  if (!agrees_with(process_set)) return;
  try {
    detail::allreduce_unless_refused(torch::zeros({5}, at::kDouble), terms(process_set), why);
  } catch (const Mismatch&) {  // they know
  }
}

/// Makes it what any rank of the set has found. A rank without gradients takes part; one that has
/// joined counts as zeros, which say nothing here: the lowest scale comes from the greatest
/// reciprocal, in double, where each float's is another and leads back to it.
void GradScaler::agree(Record& record, const ProcessSet& process_set) {
  if (!agrees_with(process_set)) return;
  const at::NoGradGuard no_gradient;
  const bool before = has_overflowed();
  const auto yes = [](bool value) { return value ? 1.0 : 0.0; };
  const double scale{*scale_};
  const at::Tensor mine = torch::tensor(
      {yes(read(record)), yes(record.has_gradients), yes(before), scale, 1.0 / scale}, at::kDouble);
  const at::Tensor all = detail::allreduce_unless_refused(mine, terms(process_set), "");
  const auto* const said = all.const_data_ptr<double>();
  record.has_gradients = said[1] != 0;
  record.has_overflowed = said[0] != 0;
  if (said[2] != 0) found_elsewhere_ = true;
  const auto highest = static_cast<float>(said[3]);
  const auto lowest = static_cast<float>(1.0 / said[4]);
  if (highest == lowest || !(highest > 0)) return;
  record.scales_differ = true;
  lowest_scale_ = lowest_scale_ == 0 ? lowest : std::min<double>(lowest_scale_, lowest);
  if (process_set.rank() == 0)
    log(LogLevel::Warning,
        "GradScaler: the ranks' scales differ, from {} to {}; the step is left out, and all go on "
        "with the smallest",
        lowest, highest);
}

/// Since the last update.
bool GradScaler::has_overflowed() {
  bool found = found_elsewhere_;
  for (auto& [optimizer, record] : records_) found = read(record) || found;
  return found;
}

void GradScaler::unscale_(Optimizer& given) {
  if (!options_.enabled) return;
  Optimizer& optimizer = detail::Wrappers::outermost(given, "GradScaler::unscale_()");
  check_scaled("unscale_()");
  const auto known = records_.find(key_of(optimizer));
  if (known != records_.end() && known->second.stage == Stage::Unscaled)
    throw InvalidArgument(
        "unscale_() has already been called on this optimizer since the last update()");
  if (known != records_.end() && known->second.stage == Stage::Stepped)
    throw InvalidArgument("unscale_() is being called after step()");
  const auto parameters = parameters_of(optimizer);
  const auto sets = detail::GradientOwners::sets_of(parameters);
  if (sets.size() > 1)
    throw InvalidArgument(
        "GradScaler: gradients of this optimizer's parameters are reduced on several process sets; "
        "give each an optimizer");
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  // Adasum reduces no gradients: who steps together is who must agree.
  const bool own_set = sets.empty() && distributed != nullptr;
  const ProcessSet set = own_set        ? distributed->process_set()
                         : sets.empty() ? options_.process_set
                                        : sets.front();
  const bool of_all = distributed != nullptr && (distributed->shards_gradients() ||
                                                 (own_set && set.included() && set.size() > 1));
  if (of_all && !options_.agree)
    throw InvalidArgument(
        "GradScaler: with shard_gradients and with ReduceOp::Adasum no rank has what all ranks "
        "step by, so ranks have to agree: set GradScalerOptions::agree");
  GradientCompressor::follow_scale(parameters, scale_);
  const bool takes_part = (sets.empty() && !own_set) || set.included();
  const double scale{*scale_};  // in double, as PyTorch takes it
  Record record{.stage = Stage::Unscaled};
  try {
    if (distributed != nullptr) distributed->synchronize_once();
    GradientCompressor::correct_scale(parameters);
    record.unread = multiply(optimizer, 1.0 / scale);
  } catch (const InvalidArgument& error) {
    if (takes_part) refuse(set, error.what());
    throw;
  } catch (const c10::Error& error) {  // no memory
    if (takes_part) refuse(set, error.what_without_backtrace());
    throw;
  }
  record.has_gradients = record.unread.defined();
  try {
    if (takes_part) agree(record, set);
  } catch (...) {
    multiply(optimizer, scale);
    throw;
  }
  records_[key_of(optimizer)] = std::move(record);
}

at::Tensor GradScaler::step(Optimizer& given, const Optimizer::LossClosure& closure) {
  Optimizer& optimizer = detail::Wrappers::outermost(given, "GradScaler::step()");
  if (!options_.enabled) return optimizer.step(closure);
  if (closure) throw InvalidArgument("GradScaler: step() with a closure is not supported");
  check_scaled("step()");
  const Optimizer* const key = key_of(optimizer);
  if (records_[key].stage == Stage::Stepped)
    throw InvalidArgument("step() has already been called since the last update()");
  if (records_[key].stage == Stage::Ready) unscale_(optimizer);
  Record& record = records_[key];
  if (!record.has_gradients)
    throw InvalidArgument("GradScaler: no parameter of the optimizer has a gradient");
  at::Tensor loss;
  const bool left_out = record.scales_differ || read(record);
  GradientCompressor::end_step(parameters_of(optimizer), left_out);
  if (!left_out) {
    loss = optimizer.step();
  } else if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer)) {
    distributed->leave_out_step();
  } else if (auto* const masters = dynamic_cast<detail::MasterOptimizer*>(&optimizer)) {
    masters->leave_out_step();
  }
  record.stage = Stage::Stepped;
  return loss;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  check_scaled("update()");
  const bool any = std::any_of(records_.begin(), records_.end(),
                               [](const auto& entry) { return entry.second.has_gradients; });
  if (!any && !found_elsewhere_)
    throw InvalidArgument("GradScaler: update() without an unscale_() or step() before it");
  const bool found = has_overflowed();
  if (lowest_scale_ > 0) {
    *scale_ = static_cast<float>(lowest_scale_);
    growth_tracker_ = 0;
  }
  if (found) {
    *scale_ = static_cast<float>(*scale_ * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (lowest_scale_ == 0 && ++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(*scale_ * options_.growth_factor);
    if (std::isfinite(grown)) *scale_ = grown;
    growth_tracker_ = 0;
  }
  forget();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  check_scaled("update()");
  *scale_ = static_cast<float>(new_scale);
  forget();
}

void GradScaler::forget() {
  records_.clear();
  found_elsewhere_ = false;
  lowest_scale_ = 0;
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_ != nullptr ? static_cast<double>(*scale_) : options_.init_scale;
}

GradScalerState GradScaler::state() const {
  if (!options_.enabled) return {};
  return {.scale = get_scale(),
          .growth_factor = options_.growth_factor,
          .backoff_factor = options_.backoff_factor,
          .growth_interval = options_.growth_interval,
          .growth_tracker = growth_tracker_};
}

void GradScaler::load_state(const GradScalerState& state) {
  if (!options_.enabled) return;
  if (state == GradScalerState{})
    throw InvalidArgument("GradScaler: the state is that of a scaler that was not enabled");
  options_.init_scale = state.scale;
  options_.growth_factor = state.growth_factor;
  options_.backoff_factor = state.backoff_factor;
  options_.growth_interval = state.growth_interval;
  growth_tracker_ = state.growth_tracker;
  if (scale_ != nullptr) *scale_ = static_cast<float>(state.scale);
}

}  // namespace hvd
