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

using Words = std::vector<std::pair<std::string, std::string>>;

/// Calls `call` with what of the options LibTorch knows, as that type; returns whether there is
/// any.
template <class Call>
bool as_libtorch(const OptimizerOptions& options, const Call& call) {
  const auto as = [&](const auto* base) {
    if (base != nullptr) call(*base);
    return base != nullptr;
  };
  using namespace torch::optim;
  return as(dynamic_cast<const SGDOptions*>(&options)) ||
         as(dynamic_cast<const AdamOptions*>(&options)) ||
         as(dynamic_cast<const AdamWOptions*>(&options)) ||
         as(dynamic_cast<const RMSpropOptions*>(&options)) ||
         as(dynamic_cast<const AdagradOptions*>(&options)) ||
         as(dynamic_cast<const LBFGSOptions*>(&options));
}

/// Returns whether LibTorch knows all of them: not what a user derives from its types.
bool is_known(const OptimizerOptions& options) {
  bool all = false;
  as_libtorch(options, [&]<class Known>(const Known&) { all = typeid(options) == typeid(Known); });
  return all;
}

/// Each field of LibTorch's own types, by the name that it has there; nothing of others.
Words fields_of(const OptimizerOptions& options) {
  Words words;
  const auto number = [&words](const char* name, auto value) {
    words.emplace_back(name, formatted("{}", value));
  };
  as_libtorch(options, [&](const auto& known) {
    number("lr", known.lr());
    if constexpr (requires { known.betas(); })
      words.emplace_back(
          "betas", formatted("({}, {})", std::get<0>(known.betas()), std::get<1>(known.betas())));
    if constexpr (requires { known.eps(); }) number("eps", known.eps());
    if constexpr (requires { known.alpha(); }) number("alpha", known.alpha());
    if constexpr (requires { known.momentum(); }) number("momentum", known.momentum());
    if constexpr (requires { known.dampening(); }) number("dampening", known.dampening());
    if constexpr (requires { known.weight_decay(); }) number("weight_decay", known.weight_decay());
    if constexpr (requires { known.nesterov(); }) number("nesterov", known.nesterov());
    if constexpr (requires { known.amsgrad(); }) number("amsgrad", known.amsgrad());
    if constexpr (requires { known.centered(); }) number("centered", known.centered());
    if constexpr (requires { known.lr_decay(); }) {
      number("lr_decay", known.lr_decay());
      number("initial_accumulator_value", known.initial_accumulator_value());
    }
    if constexpr (requires { known.history_size(); }) {
      number("max_iter", known.max_iter());
      number("max_eval", known.max_eval().value_or(-1));
      number("tolerance_grad", known.tolerance_grad());
      number("tolerance_change", known.tolerance_change());
      number("history_size", known.history_size());
      words.emplace_back("line_search_fn", known.line_search_fn().value_or("none"));
    }
  });
  return words;
}

std::string written(const OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  return text_of(archive);
}

/// Returns whether the type overrides both forms of serialize(), and not only LibTorch's own type
/// that it derives from: tried once a type, on a copy.
bool is_serializable(const OptimizerOptions& options) {
  static std::mutex mutex;
  static std::map<std::type_index, bool> tried;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = tried.emplace(typeid(options), false);
  if (!is_new) return entry->second;
  try {
    const std::string text = written(options);
    auto archive = archive_of(text, std::nullopt);
    options.clone()->serialize(archive);
    entry->second = true;
    as_libtorch(options, [&]<class Known>(const Known& base) {
      entry->second = written(Known(base)) != text;
    });
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
  if (is_known(options)) return words;
  if (const auto rate = rate_of(options); rate && words.empty())
    words.emplace_back("lr", formatted("{}", *rate));
  if (is_serializable(options))
    words.emplace_back("digest of what serialize() writes",
                       formatted("{:016x}", digest_of(written(options))));
  return words;
}

}  // namespace

bool assign_in_place(OptimizerOptions& to, const OptimizerOptions& from) {
  if (typeid(to) != typeid(from)) return false;
  if (is_known(from))
    return as_libtorch(
        from, [&to]<class Known>(const Known& source) { static_cast<Known&>(to) = source; });
  if (!is_serializable(from)) return false;
  auto archive = archive_of(written(from), std::nullopt);
  to.serialize(archive);
  if (const auto rate = rate_of(from); rate != rate_of(to)) to.set_lr(*rate);
  return true;
}

void assign(OptimizerParamGroup& group, const OptimizerOptions& from) {
  if (!assign_in_place(group.options(), from)) group.set_options(from.clone());
}

KeptOptions::KeptOptions(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
  for (const auto& group : optimizer.param_groups()) options_.push_back(group.options().clone());
}

void KeptOptions::restore() const {
  for (std::size_t g = 0; g < options_.size(); ++g)
    assign(optimizer_.param_groups()[g], *options_[g]);
}

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
  if (typeid(*before.options) != typeid(now)) return true;
  bool equal = false;
  const auto compare = [&]<class Known>(const Known& known) {
    equal = known == static_cast<const Known&>(*before.options);
  };
  if (is_known(now)) return as_libtorch(now, compare) && !equal;
  if (!before.text.empty()) return written(now) != before.text;
  const void* place = nullptr;
  const auto bytes = bytes_of(now, place);
  return place != before.place || bytes != before.bytes;
}

void SharedOptions::hand_over(const Seen& before, OptimizerParamGroup& from,
                              OptimizerParamGroup& to) {
  OptimizerOptions& source = from.options();
  OptimizerOptions& target = to.options();
  if (assign_in_place(target, source)) return;
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
