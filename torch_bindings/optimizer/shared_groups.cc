#include "torch_bindings/optimizer/shared_groups.h"

#include <torch/torch.h>

#include <algorithm>
#include <set>

#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/types.h"
#include "torch_bindings/parameters/repeated_parameters.h"

namespace hvd::detail {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

}  // namespace

SharedGroups::SharedGroups(std::vector<OptimizerParamGroup>& mine, Optimizer& wrapped,
                           const Named& names)
    : mine_(&mine), wrapped_(wrapped) {
  std::set<std::string> used;
  for (const auto& [name, parameter] : names)
    if (!used.insert(name).second)
      throw InvalidArgument(formatted("named_parameters: the name '{}' is given twice", name));
  for (const auto& named : unique_parameters(names))
    names_[named.second.unsafeGetTensorImpl()] = named;
  for (std::size_t g = 0; g < mine_->size() && !names.empty(); ++g) {
    const auto& group = (*mine_)[g].params();
    for (std::size_t p = 0; p < group.size(); ++p)
      if (!names_.contains(group[p].unsafeGetTensorImpl()))
        throw InvalidArgument(
            formatted("named_parameters: parameter {} of group {} (shape {}) has no name", p, g,
                      to_string(Shape(group[p].sizes().vec()))));
  }
  parameters_ = newcomers(*mine_);
  for (std::size_t g = 0; g < mine_->size(); ++g) {
    groups_.push_back((*mine_)[g].params());
    options_.emplace_back((*mine_)[g], wrapped_.param_groups()[g]);
  }
  note_agreed();
}

std::vector<std::int64_t> SharedGroups::layout() const {
  std::vector<std::int64_t> sizes;
  for (const auto& group : groups_) sizes.push_back(static_cast<std::int64_t>(group.size()));
  return sizes;
}

std::uint64_t SharedGroups::digest_of_options() const {
  const std::size_t groups = std::min(agreed_, options_.size());
  std::uint64_t digest = digest_of(groups, 0);
  for (std::size_t g = 0; g < groups; ++g) digest = digest_of(options_[g].digest(), digest);
  return digest;
}

SharedGroups::Words SharedGroups::words_of_options() const {
  Words all;
  for (std::size_t g = 0; g < std::min(agreed_, options_.size()); ++g)
    for (const auto& [name, value] : options_[g].words())
      all.emplace_back(formatted("option {} of group {}", name, g), value);
  return all;
}

bool SharedGroups::differs(const Groups& groups) const {
  return !std::equal(groups.begin(), groups.end(), groups_.begin(), groups_.end(),
                     [](const OptimizerParamGroup& group, const std::vector<at::Tensor>& before) {
                       return same(group.params(), before);
                     });
}

/// Returns the parameters that are not among `parameters_`, each once. A parameter may be in one
/// group several times, but not in two.
SharedGroups::Named SharedGroups::newcomers(const Groups& groups) const {
  std::unordered_map<const void*, std::size_t> group_of;
  std::set<const void*> known;
  for (const auto& [name, parameter] : parameters_) known.insert(parameter.unsafeGetTensorImpl());
  Named found;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t p = 0; p < groups[g].params().size(); ++p) {
      const at::Tensor& parameter = groups[g].params()[p];
      const void* key = parameter.unsafeGetTensorImpl();
      const auto given = names_.find(key);
      const std::string name =
          given != names_.end() ? given->second.first : formatted("parameter.{}.{}", g, p);
      const auto [before, is_first] = group_of.emplace(key, g);
      if (before->second != g)
        throw InvalidArgument(formatted(
            "parameter '{}' is in two groups of the optimizer, {} and {}; leave it in one", name,
            before->second, g));
      if (!known.contains(key) && (is_first || given == names_.end()))
        found.emplace_back(name, parameter);
    }
  }
  return unique_parameters(found);
}

void SharedGroups::copy(const Groups& from, Groups& to) {
  if (from.size() < to.size()) {  // who is who, nobody knows
    to.erase(to.begin() + static_cast<std::ptrdiff_t>(from.size()), to.end());
    for (std::size_t g = 0; g < from.size(); ++g) to[g].set_options(from[g].options().clone());
    options_.clear();
  }
  for (std::size_t g = 0; g < from.size(); ++g) {
    if (g < to.size()) {
      to[g].params() = from[g].params();
    } else {
      to.emplace_back(from[g]);
    }
  }
}

bool SharedGroups::reconcile() {
  Groups& theirs = wrapped_.param_groups();
  const bool mine_changed = differs(*mine_);
  const bool theirs_changed = differs(theirs);
  const bool changed = mine_changed || theirs_changed || forgotten_;
  if (changed) {
    if (mine_changed && theirs_changed &&
        !std::equal(mine_->begin(), mine_->end(), theirs.begin(), theirs.end(),
                    [](const auto& a, const auto& b) { return same(a.params(), b.params()); }))
      throw InvalidArgument(
          "the groups of the DistributedOptimizer and of the optimizer that it wraps have been "
          "changed in different ways; change those of one of them, the other follows");
    Named found = newcomers(mine_changed ? *mine_ : theirs);
    if (dynamic_cast<const torch::optim::Adagrad*>(&wrapped_) != nullptr)
      for (const auto& [name, parameter] : found)
        if (wrapped_.state().count(parameter.unsafeGetTensorImpl()) == 0)
          throw InvalidArgument(
              formatted("parameter '{}' has been added to an Adagrad, which makes the state of its "
                        "parameters when it is constructed, so that this one has none; construct "
                        "the Adagrad anew",
                        name));
    mine_changed ? copy(*mine_, theirs) : copy(theirs, *mine_);
    parameters_.insert(parameters_.end(), found.begin(), found.end());
    forgotten_ = false;
    groups_.clear();
    for (const auto& group : *mine_) groups_.push_back(group.params());
    for (std::size_t g = options_.size(); g < mine_->size(); ++g) {
      if (mine_changed && theirs_changed) theirs[g].set_options((*mine_)[g].options().clone());
      options_.emplace_back((*mine_)[g], theirs[g]);
    }
  }
  for (std::size_t g = 0; g < options_.size(); ++g)
    options_[g].reconcile((*mine_)[g], theirs[g], g);
  return changed;
}

void SharedGroups::forget_from(std::size_t first) {
  parameters_.resize(first);
  forgotten_ = true;
}

void SharedGroups::take_options() {
  // As if the wrapper's had not been touched, and all of the wrapped one's had.
  for (std::size_t g = 0; g < options_.size(); ++g)
    options_[g].take((*mine_)[g], wrapped_.param_groups()[g]);
}

}  // namespace hvd::detail
