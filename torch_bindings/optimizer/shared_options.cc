#include "torch_bindings/optimizer/shared_options.h"

#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <typeindex>

#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd::detail {

namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

template <class Options>
bool typed_equal(const OptimizerOptions& a, const OptimizerOptions& b, std::optional<bool>& equal) {
  const auto* left = dynamic_cast<const Options*>(&a);
  const auto* right = dynamic_cast<const Options*>(&b);
  if (left == nullptr || right == nullptr) return false;
  equal = *left == *right;
  return true;
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
struct Types {
  /// Nothing: both are not of one of these types.
  static std::optional<bool> equal(const OptimizerOptions& a, const OptimizerOptions& b) {
    std::optional<bool> result;
    static_cast<void>((typed_equal<Options>(a, b, result) || ...));
    return result;
  }
  static bool assign(OptimizerOptions& to, const OptimizerOptions& from) {
    return (typed_assign<Options>(to, from) || ...);
  }
};
using Known =
    Types<torch::optim::SGDOptions, torch::optim::AdamOptions, torch::optim::AdamWOptions,
          torch::optim::RMSpropOptions, torch::optim::AdagradOptions, torch::optim::LBFGSOptions>;

using Words = std::vector<std::pair<std::string, std::string>>;

/// Returns whether `options` are of that type; then `add` was given each field, with its name.
template <class Options, class Describe>
bool describe_as(const OptimizerOptions& options, const Describe& describe) {
  const auto* known = dynamic_cast<const Options*>(&options);
  if (known != nullptr) describe(*known);
  return known != nullptr;
}

/// Each field of LibTorch's own types, by the name that it has there; nothing of others.
Words fields_of(const OptimizerOptions& options) {
  namespace optim = torch::optim;
  Words words;
  const auto number = [&words](const char* name, double value) {
    words.emplace_back(name, formatted("{}", value));
  };
  const auto flag = [&words](const char* name, bool value) {
    words.emplace_back(name, value ? "true" : "false");
  };
  const auto adam = [&](const auto& known) {
    number("lr", known.lr());
    words.emplace_back(
        "betas", formatted("({}, {})", std::get<0>(known.betas()), std::get<1>(known.betas())));
    number("eps", known.eps());
    number("weight_decay", known.weight_decay());
    flag("amsgrad", known.amsgrad());
  };
  static_cast<void>(
      describe_as<optim::SGDOptions>(options,
                                     [&](const auto& known) {
                                       number("lr", known.lr());
                                       number("momentum", known.momentum());
                                       number("dampening", known.dampening());
                                       number("weight_decay", known.weight_decay());
                                       flag("nesterov", known.nesterov());
                                     }) ||
      describe_as<optim::AdamOptions>(options, adam) ||
      describe_as<optim::AdamWOptions>(options, adam) ||
      describe_as<optim::RMSpropOptions>(options,
                                         [&](const auto& known) {
                                           number("lr", known.lr());
                                           number("alpha", known.alpha());
                                           number("eps", known.eps());
                                           number("weight_decay", known.weight_decay());
                                           number("momentum", known.momentum());
                                           flag("centered", known.centered());
                                         }) ||
      describe_as<optim::AdagradOptions>(options,
                                         [&](const auto& known) {
                                           number("lr", known.lr());
                                           number("lr_decay", known.lr_decay());
                                           number("weight_decay", known.weight_decay());
                                           number("initial_accumulator_value",
                                                  known.initial_accumulator_value());
                                           number("eps", known.eps());
                                         }) ||
      describe_as<optim::LBFGSOptions>(options, [&](const auto& known) {
        number("lr", known.lr());
        number("max_iter", static_cast<double>(known.max_iter()));
        number("max_eval", static_cast<double>(known.max_eval().value_or(-1)));
        number("tolerance_grad", known.tolerance_grad());
        number("tolerance_change", known.tolerance_change());
        number("history_size", static_cast<double>(known.history_size()));
        words.emplace_back("line_search_fn", known.line_search_fn().value_or("none"));
      }));
  return words;
}

bool is_known(const OptimizerOptions& options) {
  return Known::equal(options, options).has_value();
}

std::string written(const OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  return text_of(archive);
}

/// Returns whether the type overrides both forms of serialize(): tried once a type, on a copy.
bool is_serializable(const OptimizerOptions& options) {
  static std::mutex mutex;
  static std::map<std::type_index, bool> tried;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = tried.emplace(typeid(options), false);
  if (!is_new) return entry->second;
  try {
    auto archive = archive_of(written(options), std::nullopt);
    options.clone()->serialize(archive);
    entry->second = true;
  } catch (const c10::Error&) {  // the base class's, which says so
  }
  return entry->second;
}

/// All that was allocated for the object: its size is known to its allocation alone.
std::vector<std::byte> bytes_of(const OptimizerOptions& options, const void*& place) {
  place = dynamic_cast<const void*>(&options);
  std::vector<std::byte> bytes(::malloc_usable_size(const_cast<void*>(place)));
  std::memcpy(bytes.data(), place, bytes.size());
  return bytes;
}

Words words_of(const OptimizerOptions& options) {
  Words words = fields_of(options);
  if (!words.empty()) return words;
  if (const auto rate = rate_of(options)) words.emplace_back("lr", formatted("{}", *rate));
  if (is_serializable(options))
    words.emplace_back("digest of what serialize() writes",
                       formatted("{:016x}", digest_of(written(options))));
  return words;
}

}  // namespace

SharedOptions::SharedOptions(const OptimizerParamGroup& mine, const OptimizerParamGroup& theirs)
    : mine_(look(mine.options())), theirs_(look(theirs.options())) {}

SharedOptions::Seen SharedOptions::look(const OptimizerOptions& options) {
  Seen seen;
  seen.options = options.clone();
  for (const auto& [name, value] : words_of(options))
    seen.digest = digest_of(value, digest_of(name, seen.digest));
  if (is_known(options)) return seen;
  if (is_serializable(options)) {
    seen.text = written(options);
  } else {
    seen.bytes = bytes_of(options, seen.place);
  }
  return seen;
}

std::vector<std::pair<std::string, std::string>> SharedOptions::words() const {
  return words_of(*mine_.options);
}

bool SharedOptions::has_changed(const Seen& before, const OptimizerOptions& now) {
  if (const auto equal = Known::equal(*before.options, now)) return !*equal;
  if (typeid(*before.options) != typeid(now)) return true;
  if (!before.text.empty()) return written(now) != before.text;
  const void* place = nullptr;
  const auto bytes = bytes_of(now, place);
  return place != before.place || bytes != before.bytes;
}

void SharedOptions::hand_over(const Seen& before, OptimizerParamGroup& from,
                              OptimizerParamGroup& to) {
  OptimizerOptions& source = from.options();
  OptimizerOptions& target = to.options();
  if (Known::assign(target, source)) return;
  if (typeid(source) == typeid(target) && is_serializable(source)) {
    auto archive = archive_of(written(source), std::nullopt);
    target.serialize(archive);
    return;
  }
  if (const auto rate = rate_of(source); rate && typeid(source) == typeid(target)) {
    if (const auto old = rate_of(*before.options)) {  // is it the rate alone?
      source.set_lr(*old);
      const bool alone = !has_changed(before, source);
      source.set_lr(*rate);
      if (alone) return target.set_lr(*rate);
    }
  }
  struct Group : OptimizerParamGroup {
    static std::unique_ptr<OptimizerOptions> take_options(OptimizerParamGroup& group) {
      return std::move(group.*(&Group::options_));
    }
  };
  retired_[retired_.front() ? 1 : 0] = Group::take_options(to);
  to.set_options(source.clone());
}

/// Both have been changed.
void SharedOptions::refuse_difference(const OptimizerOptions& mine, const OptimizerOptions& theirs,
                                      std::size_t group) {
  const Words ours = words_of(mine), others = words_of(theirs);
  std::string said;
  for (std::size_t i = 0; i < std::min(ours.size(), others.size()); ++i)
    if (ours[i] != others[i])
      said += formatted(
          "{}option {} of group {} is {} in the optimizer and {} in the one that is around it",
          said.empty() ? "" : ", ", others[i].first, group, others[i].second, ours[i].second);
  if (!said.empty())
    throw InvalidArgument(
        formatted("{}: both have been changed since the last step; make all changes, and all "
                  "schedulers, on one of the two",
                  said));
}

void SharedOptions::reconcile(OptimizerParamGroup& mine, OptimizerParamGroup& theirs,
                              std::size_t group) {
  const bool is_theirs_changed = has_changed(theirs_, theirs.options());
  if (has_changed(mine_, mine.options())) {
    if (is_theirs_changed) refuse_difference(mine.options(), theirs.options(), group);
    hand_over(mine_, mine, theirs);
  } else if (is_theirs_changed) {
    hand_over(theirs_, theirs, mine);
  } else {
    return;
  }
  mine_ = look(mine.options());
  theirs_ = look(theirs.options());
}

void SharedOptions::take(OptimizerParamGroup& mine, OptimizerParamGroup& theirs) {
  hand_over(theirs_, theirs, mine);
  mine_ = look(mine.options());
  theirs_ = look(theirs.options());
}

}  // namespace hvd::detail
