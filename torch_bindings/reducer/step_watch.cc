#include "torch_bindings/reducer/step_watch.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <typeinfo>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/precision/state_parts.h"

namespace hvd::detail {

namespace {

/// The number of passes in a row that are no accident without a call of the wrapper, each with a
/// write to the parameter after it: of a GAN's discriminator, whose gradients the generator's
/// passes give and the user throws away, parameters are written by its own step alone.
constexpr int kUnattendedPasses = 3;

bool can_be_sampled(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.numel() > 0 &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) &&
         tensor.is_non_overlapping_and_dense();
}

/// The value of one of `samples` elements, in the order of memory. Past autograd's counters, which
/// have to stay as they are.
double sample(const at::Tensor& tensor, std::size_t number, std::size_t samples) {
  const std::int64_t place = (tensor.numel() - 1) * static_cast<std::int64_t>(number) /
                             static_cast<std::int64_t>(samples - 1);
  const void* const data = tensor.const_data_ptr();
  return tensor.scalar_type() == at::kDouble ? static_cast<const double*>(data)[place]
                                             : static_cast<const float*>(data)[place];
}

double epsilon_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                             : std::numeric_limits<float>::epsilon();
}

}  // namespace

StepWatch::StateMark StepWatch::state_of(const at::Tensor& parameter) const {
  const auto& states = wrapped_.state();
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end() || !found->second || is_left_over(*found->second)) return {};
  const StateParts parts = parts_of(*found->second);
  StateMark mark{.exists = true};
  if (parts.step != nullptr) mark.steps = *parts.step;
  if (parts.step == nullptr && !parts.tensors.empty()) {
    mark.tensor = parts.tensors.front()->unsafeGetTensorImpl();
    mark.version = version_of(*parts.tensors.front());
  }
  if (const auto* const lbfgs =
          dynamic_cast<const torch::optim::LBFGSParamState*>(found->second.get()))
    mark.steps = lbfgs->func_evals();
  return mark;
}

bool StepWatch::has_counted_on(const at::Tensor& parameter, const Note& note) const {
  const StateMark now = state_of(parameter);
  if (!now.exists) return false;
  return !note.state.exists || now.steps > note.state.steps || now.tensor != note.state.tensor ||
         now.version != note.state.version;
}

bool StepWatch::was_written(const at::Tensor& parameter, const Note& note) {
  if (version_of(parameter) != note.version) return true;
  if (!note.sampled || !can_be_sampled(parameter)) return false;
  for (std::size_t i = 0; i < kSamples; ++i)
    if (sample(parameter, i, kSamples) != note.values[i]) return true;
  return false;
}

bool StepWatch::on_gradient(const at::Tensor& parameter, bool anew) {
  const int pass = torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  Note& note = notes_[parameter.unsafeGetTensorImpl()];
  bool alone = false;
  if (note.open && note.pass != pass) {
    note.unattended = anew && was_written(parameter, note) ? note.unattended + 1 : 0;
    alone = note.unattended >= kUnattendedPasses || has_counted_on(parameter, note);
  }
  note.pass = pass;
  note.open = true;
  note.version = version_of(parameter);
  note.state = state_of(parameter);
  const at::Tensor& gradient = parameter.grad();
  note.sampled = can_be_sampled(parameter) && can_be_sampled(gradient) &&
                 gradient.strides() == parameter.strides();
  for (std::size_t i = 0; note.sampled && i < kSamples; ++i) {
    note.values[i] = sample(parameter, i, kSamples);
    note.gradients[i] = sample(gradient, i, kSamples);
  }
  return alone;
}

/// Returns how many of the samples went by a step of SGD, and how many would have had to: by this
/// rank's own gradient, or by what it is now.
std::pair<std::size_t, std::size_t> StepWatch::steps_of_sgd(const at::Tensor& parameter,
                                                            const Note& note, double rate,
                                                            double decay) const {
  const at::Tensor& gradient = parameter.grad();
  const bool has_other = can_be_sampled(gradient) && gradient.strides() == parameter.strides();
  std::size_t stepped = 0, expected = 0;
  for (std::size_t i = 0; i < kSamples; ++i) {
    const double before = note.values[i];
    const double change = sample(parameter, i, kSamples) - before;
    const double unseen = epsilon_of(parameter) * std::abs(before);
    const auto by = [&](double slope) {
      const double step = -rate * (slope + decay * before);
      return std::isfinite(step) && std::abs(step) > 64 * unseen &&
             std::abs(change - step) <= std::abs(step) * 1e-3 + 4 * unseen;
    };
    const double other = has_other ? sample(gradient, i, kSamples) : note.gradients[i];
    if (note.gradients[i] == 0 && other == 0) continue;
    ++expected;
    if (by(note.gradients[i]) || by(other)) ++stepped;
  }
  return {stepped, expected};
}

std::string StepWatch::words_of(const std::string& name) {
  return formatted(
      "step() of the optimizer that a DistributedOptimizer is around was called (it has stepped "
      "parameter '{}'): that is a step by gradients that are on their way between the ranks, after "
      "which their parameters differ; call step() of the DistributedOptimizer, and nothing else",
      name);
}

std::string StepWatch::stepped(const Named& parameters) const {
  const std::lock_guard lock(mutex_);
  const auto note_of = [this](const at::Tensor& parameter) -> const Note* {
    const auto found = notes_.find(parameter.unsafeGetTensorImpl());
    return found != notes_.end() && found->second.open ? &found->second : nullptr;
  };
  std::unordered_map<const void*, std::string> names;
  for (const auto& [name, parameter] : parameters) {
    const Note* const note = note_of(parameter);
    if (note != nullptr && has_counted_on(parameter, *note)) return name;
    if (note != nullptr && note->sampled && can_be_sampled(parameter))
      names[parameter.unsafeGetTensorImpl()] = name;
  }
  if (typeid(wrapped_) != typeid(torch::optim::SGD)) return {};
  std::size_t stepped = 0, expected = 0;
  std::string first;
  for (const auto& group : wrapped_.param_groups()) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    if (options.momentum() != 0) continue;
    for (const auto& parameter : group.params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end()) continue;
      const auto [those, all] =
          steps_of_sgd(parameter, *note_of(parameter), options.lr(), options.weight_decay());
      if (those > 0 && first.empty()) first = name->second;
      stepped += those;
      expected += all;
    }
  }
  return stepped > 0 && 2 * stepped >= expected ? first : "";
}

void StepWatch::attend() {
  const std::lock_guard lock(mutex_);
  for (auto& [parameter, note] : notes_) {
    note.open = false;
    note.unattended = 0;
  }
}

void StepWatch::refuse_step(const Named& parameters) {
  const std::string name = stepped(parameters);
  attend();
  if (!name.empty()) throw InvalidArgument(words_of(name));
}

}  // namespace hvd::detail
