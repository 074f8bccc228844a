#include "torch_bindings/precision/master_copies.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/types.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd::detail {

using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

/// Calls `visit(parameter, key)` for each 16-bit parameter, once.
template <class Visit>
void for_each_sixteen_bit(const Optimizer& optimizer, const Visit& visit) {
  std::set<const void*> seen;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    std::size_t place = 0;
    for (const auto& parameter : optimizer.param_groups()[g].params())
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
        if (MasterCopy::is_for(parameter)) visit(parameter, formatted("{}/{}", g, place));
        ++place;
      }
  }
}

/// All that there are, so that a parameter's master is found without its optimizer.
struct Living {
  std::mutex mutex;
  std::vector<MasterCopies*> all;
};
Living& living() {
  static auto* const made = new Living;
  return *made;
}

}  // namespace

MasterCopy::MasterCopy(at::Tensor parameter, const at::Tensor& whole, std::int64_t begin,
                       std::int64_t end)
    : parameter_(std::move(parameter)), begin_(begin), end_(end), type_(parameter_.scalar_type()) {
  const at::NoGradGuard no_gradient;
  master_ = (whole.defined() ? part_of(whole) : weights())
                .to(parameter_.device(), at::kFloat, false, /*copy=*/true);
}

at::Tensor MasterCopy::part_of(const at::Tensor& whole) const {
  return end_ < 0 ? whole.detach() : in_memory_order_of(whole, parameter_).slice(0, begin_, end_);
}

at::Tensor MasterCopy::weights() const { return part_of(parameter_); }

void MasterCopy::follow() {
  const at::Tensor now = weights();
  const at::Tensor rounded = master_.to(type_).to(now.scalar_type());
  if (now.is_cpu() && at::equal(rounded, now)) return;  // a GPU would be waited for
  master_.copy_(at::where(rounded.eq(now), master_, now.to(at::kFloat)));
}

void MasterCopy::write() {
  weights().copy_(master_);
  type_ = parameter_.scalar_type();
}

void MasterCopy::load(const at::Tensor& whole) { master_.copy_(part_of(whole)); }

MasterCopies::MasterCopies(Optimizer& optimizer) : optimizer_(optimizer) {
  adopt({});
  const std::lock_guard lock(living().mutex);
  living().all.push_back(this);
}

MasterCopies::~MasterCopies() {
  {
    const std::lock_guard lock(living().mutex);
    std::erase(living().all, this);
  }
  take_back();
  for (const auto& [key, copy] : copies_)
    rekey(copy.second.tensor().unsafeGetTensorImpl(), key, copy.first.scalar_type());
}

at::Tensor MasterCopies::master_of(const at::Tensor& parameter) {
  const at::NoGradGuard no_gradient;
  const std::lock_guard lock(living().mutex);
  for (auto* const copies : living().all) {
    const auto found = copies->copies_.find(parameter.unsafeGetTensorImpl());
    if (found == copies->copies_.end()) continue;
    found->second.second.follow();
    return found->second.second.tensor();
  }
  return {};
}

MasterCopy& MasterCopies::copy_of(const at::Tensor& parameter, const at::Tensor& whole) {
  const auto found = copies_.find(parameter.unsafeGetTensorImpl());
  if (found != copies_.end()) return found->second.second;
  return copies_
      .emplace(parameter.unsafeGetTensorImpl(), std::pair(parameter, MasterCopy(parameter, whole)))
      .first->second.second;
}

/// Makes what the optimizer keeps for one tensor what it keeps for another, in another type.
void MasterCopies::rekey(const void* from, const void* to, at::ScalarType type) {
  auto& states = optimizer_.state();
  const auto found = states.find(const_cast<void*>(from));
  if (found == states.end()) return;
  auto state = std::move(found->second);
  states.erase(found);
  if (state)
    for (at::Tensor* const tensor : parts_of(*state).tensors)
      if (tensor->defined()) *tensor = tensor->to(type);
  states[const_cast<void*>(to)] = std::move(state);
}

/// Gives parameters that are 16-bit ones no longer their masters' values and states.
void MasterCopies::end_masters_of_wide() {
  for (auto& [key, both] : copies_) {
    auto& [parameter, copy] = both;
    if (MasterCopy::is_for(parameter)) continue;
    copy.follow();
    copy.write();
    rekey(copy.tensor().unsafeGetTensorImpl(), key, parameter.scalar_type());
  }
  std::erase_if(copies_, [](const auto& entry) { return !MasterCopy::is_for(entry.second.first); });
}

/// Gives a parameter's own state to its master: one in fp32 is from before it was a 16-bit one.
void MasterCopies::take_in_state_of(const at::Tensor& parameter) {
  const void* const key = parameter.unsafeGetTensorImpl();
  const auto state = optimizer_.state().find(const_cast<void*>(key));
  if (state == optimizer_.state().end()) return;
  std::vector<at::Tensor*> tensors;
  if (state->second) tensors = parts_of(*state->second).tensors;
  const bool is_narrow = std::any_of(tensors.begin(), tensors.end(), [](const auto* tensor) {
    return tensor->defined() && MasterCopy::is_for(*tensor);
  });
  if (tensors.empty() || is_narrow || copies_.contains(key))
    throw InvalidArgument(
        "the optimizer in a MasterWeights was stepped by itself (it has a state of a 16-bit "
        "parameter now), or before the parameter was a 16-bit one, with a state of a kind that "
        "LibTorch does not know: step the MasterWeights, or the DistributedOptimizer around it");
  rekey(key, copy_of(parameter).tensor().unsafeGetTensorImpl(), at::kFloat);
}

void MasterCopies::lend(Lent which) {
  if (lent_) return;
  const at::NoGradGuard no_gradient;
  if (which != Lent::AsTheyAre) end_masters_of_wide();
  std::vector<std::vector<at::Tensor>> groups;
  std::set<const void*> seen;
  for (const auto& group : optimizer_.param_groups()) {
    auto& tensors = groups.emplace_back(group.params());
    for (auto& tensor : tensors) {
      const at::Tensor parameter = tensor;
      if (MasterCopy::is_for(parameter)) {
        take_in_state_of(parameter);
      } else if (!copies_.contains(parameter.unsafeGetTensorImpl())) {
        continue;  // else it is about to be none of a 16-bit parameter any more
      }
      const at::Tensor gradient = which == Lent::AsTheyAre ? at::Tensor() : parameter.grad();
      const bool wanted = gradient.defined() || which == Lent::OfAll;
      if (!wanted && !copies_.contains(parameter.unsafeGetTensorImpl())) continue;
      MasterCopy& copy = copy_of(parameter);
      tensor = copy.tensor();
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (which != Lent::AsTheyAre) copy.follow();
      copy.tensor().mutable_grad() = gradient.defined() ? wide(parameter, gradient) : at::Tensor();
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g)
    std::swap(optimizer_.param_groups()[g].params(), groups[g]);
  groups_ = std::move(groups);
  lent_ = true;
  writes_ = which != Lent::AsTheyAre;
}

void MasterCopies::take_back() {
  if (!std::exchange(lent_, false)) return;
  const at::NoGradGuard no_gradient;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    std::swap(optimizer_.param_groups()[g].params(), groups_[g]);
  groups_.clear();
  for (auto& [key, copy] : copies_) {
    at::Tensor& gradient = copy.second.tensor().mutable_grad();
    if (gradient.defined() && writes_) copy.second.write();
    gradient.reset();
  }
}

void MasterCopies::multiply(const at::Tensor& parameter, double factor) {
  note(parameter, {.factor = factor});
}
void MasterCopies::clamp(const at::Tensor& parameter, double bound) {
  note(parameter, {.bound = bound});
}

void MasterCopies::note(const at::Tensor& parameter, const Change& change) {
  Factors& noted = factors_[parameter.unsafeGetTensorImpl()];
  static_cast<void>(wide(parameter, at::empty({0})));  // throws if it was changed
  using Since = GradientMark::Since;
  if (noted.gradient.since(parameter.grad()) != Since::Same) noted.factors.clear();
  noted.factors.push_back(change);
  noted.gradient.set(parameter.grad());
}

at::Tensor MasterCopies::wide(const at::Tensor& parameter, const at::Tensor& part) const {
  // it may be fp32 already, and is changed
  at::Tensor gradient = part.to(at::kFloat, false, /*copy=*/true);
  const auto noted = factors_.find(parameter.unsafeGetTensorImpl());
  if (noted == factors_.end() || noted->second.factors.empty()) return gradient;
  const auto since = noted->second.gradient.since(parameter.grad());
  if (since == GradientMark::Since::Changed)
    throw InvalidArgument(formatted(
        "MasterWeights: the gradient of a parameter ({}) was changed after GradScaler::unscale_() "
        "or clip_grad_norm_() or clip_grad_value_(), which apply to its fp32 gradient; change it "
        "before, and throw it away by the optimizer's zero_grad()",
        describe(parameter)));
  if (since != GradientMark::Since::Same) return gradient;
  for (const auto& [factor, bound] : noted->second.factors) {
    if (factor != 1) gradient.mul_(factor);
    if (!std::isinf(bound)) gradient.clamp_(-bound, bound);
  }
  return gradient;
}

MasterCopies::Masters MasterCopies::release() {
  take_back();
  Masters all = masters();
  for (const auto& [key, copy] : copies_)
    rekey(copy.second.tensor().unsafeGetTensorImpl(), key, at::kFloat);
  copies_.clear();
  return all;
}

void MasterCopies::adopt(const Masters& masters) {
  const at::NoGradGuard no_gradient;
  for_each_sixteen_bit(optimizer_, [&](const at::Tensor& parameter, const std::string& /*key*/) {
    const void* const key = parameter.unsafeGetTensorImpl();
    const auto master = masters.find(key);
    const auto state = optimizer_.state().find(const_cast<void*>(key));
    const bool has_state = state != optimizer_.state().end();
    if (master == masters.end() && !has_state) return;
    if (has_state && state->second && parts_of(*state->second).tensors.empty() &&
        !fresh_state(optimizer_))
      throw InvalidArgument(
          "MasterWeights: the optimizer has a state already, of a kind that LibTorch does not "
          "know, so that it cannot be taken to fp32; make the MasterWeights before the first step");
    MasterCopy& copy = copy_of(parameter, master == masters.end() ? at::Tensor() : master->second);
    rekey(key, copy.tensor().unsafeGetTensorImpl(), at::kFloat);
  });
}

std::function<void()> MasterCopies::set_aside() {
  take_back();
  struct Before {
    decltype(copies_) copies;
    States states;
  };
  auto before = std::make_shared<Before>();
  before->copies = std::exchange(copies_, {});
  before->states = std::exchange(optimizer_.state(), {});
  return [this, before] {
    copies_ = std::move(before->copies);
    optimizer_.state() = std::move(before->states);
  };
}

MasterCopies::Masters MasterCopies::masters() const {
  Masters all;
  for (const auto& [key, copy] : copies_) all[key] = copy.second.tensor();
  return all;
}

void MasterCopies::write(OutputArchive& archive, const Optimizer& optimizer,
                         const Masters& masters) {
  OutputArchive all(archive.compilation_unit());
  for_each_sixteen_bit(optimizer, [&](const at::Tensor& parameter, const std::string& key) {
    const auto master = masters.find(parameter.unsafeGetTensorImpl());
    if (master != masters.end()) all.write(key, master->second);
  });
  archive.write("masters", all);
}

MasterCopies::Masters MasterCopies::read(InputArchive& archive, const Optimizer& optimizer) {
  Masters masters;
  InputArchive all;
  if (!archive.try_read("masters", all)) return masters;
  for_each_sixteen_bit(optimizer, [&](const at::Tensor& parameter, const std::string& key) {
    at::Tensor master;
    if (!all.try_read(key, master)) return;
    if (master.sizes() != parameter.sizes())
      throw InvalidArgument(formatted("the fp32 master {} has shape {}, and its parameter here {}",
                                      key, to_string(master.sizes().vec()),
                                      to_string(parameter.sizes().vec())));
    masters[parameter.unsafeGetTensorImpl()] = master;
  });
  return masters;
}

}  // namespace hvd::detail
