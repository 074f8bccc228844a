#include "torch_bindings/optimizer/adasum_deltas.h"

#include <torch/torch.h>

#include <map>
#include <mutex>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/gradients/gradient_hooks.h"
#include "torch_bindings/platform/device.h"
#include "torch_bindings/reducer/step_watch.h"

namespace hvd {

/// Backward passes since the last step, by parameter.
struct AdasumDeltas::Passes {
  std::mutex mutex;
  std::vector<int> counts;
  int limit = 1;
};

namespace {

/// A tensor of the wire's type and the parameter's layout, on the host where its ranks can work on
/// it in place.
at::Tensor wire_for(const at::Tensor& parameter, at::ScalarType type) {
  const at::Tensor like =
      at::empty_like(parameter, parameter.options().requires_grad(false).dtype(type));
  return like.is_cpu() && like.is_non_overlapping_and_dense() ? detail::empty_shared_like(like)
                                                              : like;
}

}  // namespace

AdasumDeltas::AdasumDeltas(Terms terms)
    : terms_(std::move(terms)),
      passes_(std::make_shared<Passes>()),
      replicas_(terms_.name, terms_.process_set) {
  passes_->limit = terms_.passes;
  replicas_.watch(terms_.replicas);
}

AdasumDeltas::~AdasumDeltas() {
  for (auto& slot : slots_) detail::remove_gradient_hooks(slot.parameter, this, slot.before_hook);
}

void AdasumDeltas::add(const Named& parameters, std::size_t first) {
  const at::NoGradGuard no_gradient;
  std::vector<Slot> added;  // all or none
  for (std::size_t i = first; i < parameters.size(); ++i) {
    if (!detail::gets_gradients(parameters[i].second)) continue;
    added.push_back({parameters[i].first, parameters[i].second, {}, {}, {}});
    make_room(added.back());
  }
  for (auto& slot : added) {
    slots_.push_back(std::move(slot));
    const std::lock_guard lock(passes_->mutex);
    passes_->counts.push_back(0);
  }
  put_hooks();
  replicas_.watch(parameters);
}

/// Puts on what is not there, also where a user's hook has taken its place.
void AdasumDeltas::put_hooks() {
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    Slot& slot = slots_[place];
    detail::put_gradient_hooks(slot.parameter, this, slot.before_hook,
                               /*wants_before=*/true, [&] { return calls_at(place); });
  }
}

/// A pass too many is refused before it is added to what the others have given, which still counts.
detail::GradientCalls AdasumDeltas::calls_at(std::size_t place) const {
  const Slot& slot = slots_[place];
  const auto refuse_more = [place, name = slot.name, parameter = slot.parameter,
                            witness = terms_.witness](Passes& passes) {
    if (passes.counts[place] < passes.limit) return;
    if (witness && !witness->stepped({{name, parameter}}).empty())
      throw InvalidArgument(detail::StepWatch::words_of(name));
    if (!parameter.grad().defined()) {  // it was thrown away
      passes.counts[place] = 0;
      return;
    }
    throw InvalidArgument(
        formatted("gradient of '{}': more than {} backward passes without step(); raise "
                  "backward_passes_per_step or call step() or zero_grad() in between",
                  name, passes.limit));
  };
  auto after = [weak = std::weak_ptr(passes_), refuse_more, place, name = slot.name,
                parameter = slot.parameter, witness = terms_.witness] {
    const auto passes = weak.lock();
    if (!passes) return;
    if (witness && witness->on_gradient(parameter, false))
      throw InvalidArgument(detail::StepWatch::words_of(name));
    const std::lock_guard lock(passes->mutex);
    refuse_more(*passes);
    ++passes->counts[place];
  };
  auto before = [weak = std::weak_ptr(passes_), refuse_more] {
    const auto passes = weak.lock();
    if (!passes) return;
    const std::lock_guard lock(passes->mutex);
    refuse_more(*passes);
  };
  return {.after = std::move(after), .before = std::move(before)};
}

void AdasumDeltas::remember() {
  const at::NoGradGuard no_gradient;
  replicas_.begin_round();
  replicas_.end_round();  // before the ranks' own steps change them
  for (auto& slot : slots_) {
    const at::Tensor& parameter = slot.parameter;
    if (slot.start.options().type_equal(parameter.options()) &&
        slot.start.device() == parameter.device() && slot.start.sizes() == parameter.sizes()) {
      slot.start.copy_(parameter);
    } else {  // the model has been moved since
      make_room(slot);
    }
  }
}

void AdasumDeltas::make_room(Slot& slot) const {
  if (!at::isFloatingType(slot.parameter.scalar_type()))
    throw InvalidArgument(
        formatted("ReduceOp::Adasum combines real floating-point numbers; parameter '{}' is {}",
                  slot.name, c10::toString(slot.parameter.scalar_type())));
  const DataType wire =
      terms_.compression.wire_type(detail::data_type_of(slot.parameter, slot.name));
  slot.start = slot.parameter.detach().clone();
  slot.wire = wire_for(slot.parameter, detail::scalar_type_of(wire));
}

void AdasumDeltas::put_back() {
  const at::NoGradGuard no_gradient;
  for (auto& slot : slots_) slot.parameter.copy_(slot.start);
}

std::shared_ptr<HandleState> AdasumDeltas::submit(const std::vector<std::size_t>& slots,
                                                  std::size_t number, bool refused) {
  const Slot& first = slots_[slots.front()];
  const AllreduceOptions options{.name = formatted("{}/changes.{}", terms_.name, number),
                                 .op = ReduceOp::Adasum,
                                 .process_set = terms_.process_set};
  Submission submission = request(OpKind::Allreduce, options, detail::device_of(first.wire));
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  std::vector<std::shared_ptr<void>> kept;
  for (const auto i : slots) {
    TensorArgument argument = detail::argument(slots_[i].wire, slots_[i].wire, slots_[i].name);
    argument.name = slots_[i].name;
    if (refused) argument.shape.insert(argument.shape.begin(), 1);  // which is a Mismatch
    submission.tensors.push_back(std::move(argument));
    kept.push_back(std::make_shared<at::Tensor>(slots_[i].wire));
  }
  if (auto point = detail::stream_point(first.wire, options.name)) {
    for (auto& argument : submission.tensors) argument.ready_event = point->event();
    kept.push_back(std::move(point));
  }
  submission.keep_alive = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept));
  return engine()->submit(std::move(submission), After::Wait);
}

void AdasumDeltas::combine(const std::string& refusal) {
  const at::NoGradGuard no_gradient;
  if (!refusal.empty()) put_back();
  std::map<std::string, std::vector<std::size_t>> by_device;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.wire.scalar_type() == slot.start.scalar_type()) {
      at::sub_out(slot.wire, slot.parameter.detach(), slot.start);
    } else {
      slot.wire.copy_(slot.parameter.detach() - slot.start);
    }
    by_device[slot.wire.device().str()].push_back(i);
  }
  std::vector<std::pair<std::size_t, std::shared_ptr<HandleState>>> under_way;
  detail::FirstFailure failure;
  failure.attempt([&] {
    for (const auto& [device, slots] : by_device)
      under_way.emplace_back(slots.front(), submit(slots, under_way.size(), !refusal.empty()));
  });
  for (const auto& one : under_way)
    failure.attempt([&] {
      engine()->wait(*one.second);
      detail::wait_on_current_stream(slots_[one.first].wire, one.second->completions, terms_.name);
    });
  if (failure) put_back();
  try {
    failure.rethrow();
  } catch (const Deadlock&) {  // the others are somewhere else
    throw;
  } catch (const Mismatch& error) {
    const std::string mine =
        refusal.empty() ? "" : formatted("; rank {} has made no step: {}", rank(), refusal);
    throw Mismatch(error.what() +
                   detail::said_by_all(mine, terms_.name + "/refused", terms_.process_set));
  }
  for (auto& slot : slots_) {
    at::Tensor parameter = slot.parameter.detach();  // shares memory and version
    at::add_out(parameter, slot.start, slot.wire);
  }
  replicas_.note_step();
}

void AdasumDeltas::check_replicas() { replicas_.check(); }

void AdasumDeltas::begin_step() {
  put_hooks();
  const std::lock_guard lock(passes_->mutex);
  passes_->counts.assign(passes_->counts.size(), 0);
}

void AdasumDeltas::set_passes(int passes) {
  const std::lock_guard lock(passes_->mutex);
  passes_->limit = passes;
}

}  // namespace hvd
