#include "torch_bindings/optimizer/optimizer_reducers.h"

#include <utility>

#include "torch_bindings/optimizer/shared_groups.h"
#include "torch_bindings/reducer/reducer.h"
#include "torch_bindings/reducer/step_watch.h"

namespace hvd::detail {

OptimizerReducers::OptimizerReducers(SharedGroups& groups, std::shared_ptr<StepWatch> watch)
    : groups_(groups), watch_(std::move(watch)) {}

void OptimizerReducers::add(std::shared_ptr<GradientReducer> reducer) {
  const bool is_first = reducers_.empty();
  if (is_first) reducer->watch(groups_.terms());
  if (!is_first) reducer->set_join(first().join_rounds());
  if (!is_first) reducer->set_weight(first().weight());
  reducer->hook({.witness = watch_});
  reducers_.push_back(std::move(reducer));
  is_first ? static_cast<void>(agreed_ = 1) : reducers_.back()->listen(false);
}

/// At the end of a call that all ranks make: none of them has submitted anything of the next round
/// yet, which is to compare the groups. Returns whether there was something to announce.
bool OptimizerReducers::announce_changes() {
  if (!std::exchange(unannounced_, false) || reducers_.empty()) return false;
  first().announce(groups_.layout());
  return true;
}

/// Uses that reducer from now on, which other ranks may not have: they compare first, unless the
/// round before has compared.
void OptimizerReducers::take_up(std::size_t reducer) {
  if (unannounced_) first().compare(groups_.layout());
  unannounced_ = false;
  reducers_[reducer]->listen(true);
  agreed_ = reducer + 1;
}

/// Returns what there is to say of it here: where parameters differ as the optimizer was stepped by
/// itself, that it was.
std::exception_ptr OptimizerReducers::cause_of(const Mismatch& error) {
  const std::string text = error.what();
  if (watch_ && text.find(kParametersDiffer) != std::string::npos) {
    try {
      watch_->refuse_step(groups_.parameters());
    } catch (const InvalidArgument&) {
      return std::current_exception();
    }
  }
  const std::string hint = changed_ ? " (here the groups of the optimizer have been changed since "
                                      "the last step; do so on all ranks)"
                                    : "";
  return std::make_exception_ptr(Mismatch(text + hint));
}

void OptimizerReducers::reduce(bool also_synchronized) {
  std::exception_ptr failure;
  bool on_all_ranks = false;
  for (std::size_t i = 1; i < agreed_; ++i) {
    try {
      reducers_[i]->tell_weight();
    } catch (const InvalidArgument&) {  // as its own turn will say
      failure = std::current_exception();
    }
  }
  for (std::size_t i = 0; i < reducers_.size(); ++i) {
    if (on_all_ranks && i >= agreed_) break;
    if (!also_synchronized && reducers_[i]->is_synchronized()) continue;
    try {
      if (i >= agreed_) take_up(i);
      reducers_[i]->synchronize();
    } catch (const Deadlock&) {  // the others are somewhere else
      on_all_ranks = true;
      failure = std::current_exception();
      break;
    } catch (const Mismatch& error) {
      on_all_ranks = true;
      if (!failure) failure = cause_of(error);
    } catch (const InvalidArgument&) {
      if (!failure) failure = std::current_exception();
    } catch (...) {
      on_all_ranks = true;
      if (!failure) failure = std::current_exception();
    }
  }
  const bool compares_next = announce_changes();
  // the others know nothing of an error of this rank alone: they have compared their groups
  if (!on_all_ranks) {
    changed_ = compares_next;
    if (!changed_) groups_.note_agreed();
  }
  if (failure) {
    if (watch_) watch_->attend();  // what follows is no step of these gradients
    std::rethrow_exception(failure);
  }
  if (watch_) watch_->refuse_step(groups_.parameters());
}

void OptimizerReducers::settle() {
  std::exception_ptr failure;
  for (const auto& reducer : reducers_) {  // all: the other ranks go on to them
    try {
      reducer->settle();
    } catch (const Deadlock&) {  // the others are somewhere else
      failure = std::current_exception();
      break;
    } catch (const Mismatch& error) {
      if (!failure) failure = cause_of(error);
    }
  }
  announce_changes();
  if (failure) std::rethrow_exception(failure);
}

void OptimizerReducers::set_weight(double weight) {
  for (const auto& reducer : reducers_) {
    if (reducer->is_synchronized())
      throw InvalidArgument(
          "set_weight(): the gradients of this step are reduced already; call it after step(), "
          "before the next backward()");
    refuse_late_weight(*reducer);
  }
  for (const auto& reducer : reducers_) reducer->set_weight(weight);
}

std::vector<at::Tensor> OptimizerReducers::compression_memory() const {
  std::vector<at::Tensor> memory;
  for (const auto& reducer : reducers_) {
    if (reducer->compressor() == nullptr) continue;
    const auto more = reducer->compressor()->memory();
    memory.insert(memory.end(), more.begin(), more.end());
  }
  return memory;
}

}  // namespace hvd::detail
