#include "torch_bindings/optimizer/optimizer_state.h"

#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>
#include <torch/torch.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/files/checkpoint_reader.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/parameters/repeated_parameters.h"
#include "torch_bindings/precision/master_copies.h"
#include "torch_bindings/precision/master_optimizer.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd::detail {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

template <class T>
std::string type_of(const T& object) {
  return c10::demangle(typeid(object).name());
}

using Places = RepeatedParameters::Places;

/// Returns a guard: while it lives, the parameters of each group stand as `names` says, where
/// `mine` are these names in another order: in an archive states go by place.
auto ordered_by_name(Optimizer& holder, const NamesByGroup& mine, const NamesByGroup& names) {
  std::vector<std::vector<at::Tensor>> groups;  // empty where nothing is changed
  if (!names.empty() && mine != names) {
    const RepeatedParameters each_once(holder, Places::LeftOut);
    for (std::size_t g = 0; g < names.size(); ++g) {
      auto& group = groups.emplace_back();
      for (const auto& name : names[g]) {
        const auto place =
            std::find(mine.at(g).begin(), mine.at(g).end(), name) - mine.at(g).begin();
        group.push_back(holder.param_groups().at(g).params().at(static_cast<std::size_t>(place)));
      }
    }
  }
  const auto swap_all = [&holder](std::vector<std::vector<at::Tensor>>& params) {
    for (std::size_t g = 0; g < params.size(); ++g)
      std::swap(holder.param_groups()[g].params(), params[g]);
  };
  swap_all(groups);
  return c10::make_scope_exit(
      [swap_all, groups = std::move(groups)]() mutable { swap_all(groups); });
}

std::string state_key(std::size_t group, std::size_t place) {
  return formatted("state/{}/{}", group, place);
}
std::string opaque_key(std::size_t group, std::size_t place) {
  return formatted("opaque/{}/{}", group, place);
}
std::string group_key(std::size_t group) { return formatted("group/{}", group); }

/// Calls `visit(key, group, place)` for every parameter, once.
void for_each_parameter(Optimizer& optimizer,
                        const std::function<void(void*, std::size_t, std::size_t)>& visit) {
  const RepeatedParameters each_once(optimizer, Places::LeftOut);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (std::size_t p = 0; p < optimizer.param_groups()[g].params().size(); ++p)
      visit(optimizer.param_groups()[g].params()[p].unsafeGetTensorImpl(), g, p);
}

void add_once(std::vector<std::string>& texts, std::string text) {
  if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(std::move(text));
}

void write_options(const OptimizerParamGroup& group, OutputArchive& archive,
                   UnsavedParts& unsaved) {
  const OptimizerOptions& options = group.options();
  const auto rate = rate_of(options);
  if (rate) archive.write("lr", c10::IValue(*rate));
  try {
    OutputArchive whole(archive.compilation_unit());
    options.serialize(whole);
    archive.write("options", whole);
  } catch (const c10::Error&) {
    if (rate) {
      add_once(unsaved.rates, type_of(options));
    } else {
      add_once(unsaved.options,
               formatted("its options {} override neither serialize nor get_lr and set_lr",
                         type_of(options)));
    }
  }
}

UnsavedParts write_parts(Optimizer& optimizer, OutputArchive& archive) {
  UnsavedParts unsaved;
  unsaved.type = type_of(optimizer);
  archive.write("groups", c10::IValue(static_cast<std::int64_t>(optimizer.param_groups().size())));
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    write_options(optimizer.param_groups()[g], group, unsaved);
    archive.write(group_key(g), group);
  }
  std::size_t found = 0;
  for_each_parameter(optimizer, [&](void* key, std::size_t g, std::size_t p) {
    const auto state = optimizer.state().find(key);
    if (state == optimizer.state().end()) return;
    ++found;
    if (!state->second) return;
    try {
      OutputArchive whole(archive.compilation_unit());
      std::as_const(*state->second).serialize(whole);
      archive.write(state_key(g, p), whole);
    } catch (const c10::Error&) {
      archive.write(opaque_key(g, p), c10::IValue(true));
      add_once(unsaved.states, formatted("its state {} cannot be serialized ({})",
                                         type_of(*state->second), words_of_current_exception()));
    }
  });
  if (found != optimizer.state().size())
    add_once(unsaved.states, "it has a state that belongs to none of its parameters");
  return unsaved;
}

bool writes_something(Optimizer& optimizer) {
  OutputArchive archive;
  const RepeatedParameters each_once(optimizer, Places::LeftOut);
  optimizer.save(archive);
  return !as_input(archive).keys().empty();
}

InputArchive parts_of(Optimizer& optimizer) {
  OutputArchive archive;
  write_parts(optimizer, archive);
  return as_input(archive);
}

}  // namespace

bool is_sharded(const Optimizer& optimizer) {
  const auto* const distributed = dynamic_cast<const DistributedOptimizer*>(&optimizer);
  return distributed != nullptr && distributed->is_sharded();
}

Optimizer& holder_of(Optimizer& optimizer) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  return distributed != nullptr && !distributed->is_sharded() ? distributed->wrapped() : optimizer;
}

Statements outline_of(Optimizer& optimizer) {
  const bool sharded = is_sharded(optimizer);
  Statements outline{
      {"the optimizer's state", sharded ? "sharded" : "not sharded"},
      {"the number of parameter groups", formatted("{}", optimizer.param_groups().size())}};
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  const NamesByGroup names =
      distributed != nullptr ? distributed->names_by_group() : NamesByGroup{};
  const RepeatedParameters each_once(optimizer, Places::LeftOut);
  for (std::size_t g = 0; g < names.size(); ++g)
    for (std::size_t p = 0; p < names[g].size(); ++p)
      outline.emplace_back(
          formatted("parameter '{}' of group {}", names[g][p], g),
          (sharded ? formatted("number {}, ", p) : "") +  // its state goes by place
              describe(optimizer.param_groups()[g].params()[p]));
  for (std::size_t g = 0; g < optimizer.param_groups().size() && names.empty(); ++g)
    for (std::size_t p = 0; p < optimizer.param_groups()[g].params().size(); ++p)
      outline.emplace_back(formatted("parameter {} of group {}", p, g),
                           describe(optimizer.param_groups()[g].params()[p]));
  return outline;
}

NamesByGroup names_of(Optimizer& optimizer) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  return distributed != nullptr && !distributed->is_sharded() ? distributed->names_by_group()
                                                              : NamesByGroup{};
}

UnsavedParts save_optimizer(Optimizer& optimizer, OutputArchive& own, OutputArchive& parts,
                            std::optional<int> only) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  if (distributed != nullptr) distributed->param_groups();  // shares changed options
  if (is_sharded(optimizer)) {
    only ? distributed->save_on(*only, own) : optimizer.save(own);
    const Optimizer& wrapped = distributed->wrapped();
    if (is_of_libtorch(wrapped) || distributed->master_copies() != nullptr ||
        (only && *only != rank()) || !as_input(own).keys().empty())
      return {};
    UnsavedParts unsaved = write_parts(optimizer, parts);  // without a state: the options
    unsaved.type = type_of(wrapped);
    unsaved.own = false;
    if (!distributed->state().empty()) unsaved.states.emplace_back("its state is shared out");
    return unsaved;
  }
  Optimizer& holder = holder_of(optimizer);
  drop_scratch(holder);
  {
    const RepeatedParameters each_once(holder, Places::LeftOut);
    holder.save(own);
  }
  if (is_of_libtorch(holder)) return {};
  UnsavedParts unsaved = write_parts(holder, parts);
  if (!unsaved.states.empty() || !unsaved.options.empty() || !unsaved.rates.empty())
    unsaved.own = writes_something(holder);
  return unsaved;
}

OptimizerLoad::OptimizerLoad(Optimizer& optimizer)
    : optimizer_(optimizer), holder_(holder_of(optimizer)) {
  // shares changed options
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer))
    distributed->param_groups();
  // likewise
  if (auto* const masters = dynamic_cast<MasterOptimizer*>(&holder_)) masters->share_changes();
  options_.emplace(holder_);
}

bool OptimizerLoad::takes_unread() const {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer_);
  const Optimizer& optimizer = distributed != nullptr ? distributed->wrapped() : optimizer_;
  return is_of_libtorch(optimizer) && typeid(optimizer) != typeid(torch::optim::LBFGS);
}

void OptimizerLoad::load(InputArchive& own, InputArchive* parts, bool with_options,
                         const NamesByGroup& names, CheckpointReader* reader) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer_);
  const bool sharded = is_sharded(optimizer_);
  begun_ = true;
  if (auto* const masters = dynamic_cast<MasterOptimizer*>(&holder_))
    bring_masters_back_ = masters->copies().set_aside();
  if (sharded) bring_masters_back_ = distributed->remember_masters();
  // what the archive does not have must not stay
  before_ = std::exchange(sharded ? distributed->state() : holder_.state(), {});
  const bool by_itself = !own.keys().empty();
  if (!by_itself && (parts == nullptr || (sharded && has_states(*parts))))
    throw InvalidArgument(
        formatted("there is nothing of the optimizer in it; {} has to override save and load",
                  type_of(sharded ? distributed->wrapped() : holder_)));
  if (sharded && by_itself) {
    distributed->load_unread(own, reader);
  } else {
    const auto ordered =
        ordered_by_name(holder_, names.empty() ? names : names_of(optimizer_), names);
    const RepeatedParameters each_once(holder_, Places::LeftOut);
    if (by_itself) holder_.load(own);
    if (reader != nullptr && takes_unread())
      for (const auto& [key, state] : holder_.state())
        for (const at::Tensor* const tensor : detail::parts_of(*state).tensors)
          reader->want(*tensor);
    if (parts != nullptr) load_parts(*parts, with_options, by_itself);
  }
  if (!with_options) options_->restore();
  show_options();
}

/// Returns whether there are states by themselves, which nobody cuts into shares.
bool OptimizerLoad::has_states(InputArchive& parts) {
  bool found = false;
  for_each_parameter(holder_, [&](void*, std::size_t g, std::size_t p) {
    InputArchive state;
    c10::IValue opaque;
    found =
        found || parts.try_read(state_key(g, p), state) || parts.try_read(opaque_key(g, p), opaque);
  });
  return found;
}

void OptimizerLoad::load_parts(InputArchive& parts, bool with_options, bool by_itself) {
  const std::int64_t groups = value_at(parts, "groups").toInt();
  if (groups != static_cast<std::int64_t>(holder_.param_groups().size()))
    throw InvalidArgument(
        formatted("it is of an optimizer with {} parameter groups, and here are {}", groups,
                  holder_.param_groups().size()));
  InputArchive mine = parts_of(holder_);
  if (with_options) load_options(parts, mine, by_itself);
  load_states(parts, mine);
  mine = parts_of(holder_);
  for (std::size_t g = 0; g < holder_.param_groups().size() && with_options; ++g)
    if (!same_at(group_key(g), parts, mine))
      throw InvalidArgument(formatted("the options {} of group {} do not read what they write",
                                      type_of(holder_.param_groups()[g].options()), g));
  for_each_parameter(holder_, [&](void*, std::size_t g, std::size_t p) {
    c10::IValue opaque;
    if (!parts.try_read(opaque_key(g, p), opaque) && !same_at(state_key(g, p), parts, mine))
      throw InvalidArgument(
          formatted("the state of parameter {} of group {} is not what was written: the serialize "
                    "of {}'s state does not read what it writes, or reads it into tensors that "
                    "several states share; override save and load of the optimizer",
                    p, g, type_of(holder_)));
  });
}

void OptimizerLoad::load_options(InputArchive& parts, InputArchive& mine, bool by_itself) {
  for (std::size_t g = 0; g < holder_.param_groups().size(); ++g) {
    InputArchive group, whole;
    parts.read(group_key(g), group);
    OptimizerOptions& options = holder_.param_groups()[g].options();
    if (!by_itself && group.keys().empty())
      throw InvalidArgument(formatted(
          "there is nothing of the options of group {} in it, as {} overrides neither serialize "
          "nor get_lr and set_lr; keep the program's own (load_options = false), or override them",
          g, type_of(options)));
    if (same_at(group_key(g), parts, mine)) continue;
    c10::IValue rate;
    if (group.try_read("options", whole)) options.serialize(whole);
    if (group.try_read("lr", rate)) options.set_lr(rate.toDouble());
  }
}

void OptimizerLoad::load_states(InputArchive& parts, InputArchive& mine) {
  for_each_parameter(holder_, [&](void* key, std::size_t g, std::size_t p) {
    InputArchive whole;
    c10::IValue opaque;
    if (parts.try_read(opaque_key(g, p), opaque)) {  // only its own load can bring it
      if (holder_.state().find(key) == holder_.state().end())
        throw InvalidArgument(formatted(
            "the load of {} does not bring back the state of parameter {} of group {}; override it",
            type_of(holder_), p, g));
    } else if (!parts.try_read(state_key(g, p), whole)) {
      holder_.state().erase(key);
    } else if (!same_at(state_key(g, p), parts, mine)) {
      auto blank = blank_state(key);
      if (!blank)
        throw InvalidArgument(
            formatted("{} does not override load, and LibTorch cannot make a state for parameter "
                      "{} of group {} where the optimizer has no state to copy; override save and "
                      "load, or let it take a step on every rank before",
                      type_of(holder_), p, g));
      auto& state = holder_.state()[key];
      state = std::move(blank);  // first, as undo() looks for it there
      state->serialize(whole);
    }
  });
}

/// Writes down the states as they were, before the first of them, or a copy that shares tensors
/// with it, is read into.
void OptimizerLoad::keep_states() {
  if (!kept_.empty()) return;
  for (const auto& [key, state] : before_) {
    if (!state) continue;
    auto& text = kept_[key];
    try {
      OutputArchive whole;
      std::as_const(*state).serialize(whole);
      text = text_of(whole);
    } catch (const std::exception&) {  // it cannot be written: what is there stays
    }
  }
}

/// A state to read into: a copy of the parameter's own, or of any there is; null if none.
std::unique_ptr<OptimizerParamState> OptimizerLoad::blank_state(void* key) {
  keep_states();
  for (States* const states : {&holder_.state(), &before_}) {
    const auto own = states->find(key);
    if (own == states->end() || !own->second) continue;
    try {
      return own->second->clone();
    } catch (const c10::Error&) {  // it does not override clone
      return std::move(own->second);
    }
  }
  for (States* const states : {&before_, &holder_.state()}) {
    for (const auto& [unused, model] : *states) {
      try {
        if (model) return model->clone();
      } catch (const c10::Error&) {
        continue;
      }
    }
  }
  return nullptr;
}

/// The wrapper has copies of the wrapped optimizer's options.
void OptimizerLoad::show_options() {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer_);
  if (distributed == nullptr) return;
  auto& groups = distributed->param_groups();
  distributed->note_state();
  if (&holder_ == &optimizer_ || is_of_libtorch(holder_)) return;
  for (std::size_t i = 0; i < groups.size(); ++i)
    assign(groups[i], holder_.param_groups()[i].options());
}

void OptimizerLoad::undo() {
  if (!std::exchange(begun_, false)) return;
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer_);
  States& states = is_sharded(optimizer_) ? distributed->state() : holder_.state();
  for (auto& [key, state] : before_)  // one that cannot be copied was read into itself
    if (!state && kept_.contains(key)) state = std::move(states[key]);
  states = std::move(before_);
  if (bring_masters_back_) bring_masters_back_();
  options_->restore();
  show_options();
  for (const auto& [key, text] : kept_) {
    if (text.empty()) continue;
    OutputArchive whole;
    std::as_const(*states[key]).serialize(whole);
    InputArchive before = archive_of(text, std::nullopt), now = as_input(whole);
    if (!same_archive(before, now)) states[key]->serialize(before);
  }
}

}  // namespace hvd::detail
