#include "torch_bindings/modules/activation_checkpoint.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/modules/recomputation.h"
#include "torch_bindings/platform/saved_tensors.h"

namespace hvd::detail {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

/// A tensor that is there, to be given as it is now.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(version_of(tensor_)) {}
  [[nodiscard]] bool is_there() const { return tensor_.defined(); }
  [[nodiscard]] at::Tensor give() const {
    if (version_of(tensor_) != version_)
      throw InvalidArgument(
          formatted("checkpoint: a tensor that backward needs ({}) has been changed in place since "
                    "it was saved (its version was {} and is {}); clone it before",
                    describe(tensor_), version_, version_of(tensor_)));
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  std::int64_t version_ = -1;
};

/// Thrown through the function when all tensors are there.
struct AllTensorsAreThere {};

/// An input of the part. In a part within another it is itself one of the tensors left out.
struct CheckpointedInput {
  explicit CheckpointedInput(const at::Tensor& tensor)
      : version(version_of(tensor)),
        is_plain(tensor.defined() && tensor.is_inference()),
        plain(is_plain ? tensor : at::Tensor()) {
    if (!is_plain) saved = SavedVariable(tensor, /*is_output=*/false);
  }
  [[nodiscard]] at::Tensor again() const {
    if (is_plain) return plain;
    if (const auto there = saved.get_raw_data();
        there && there->defined() && version_of(*there) != version)
      throw InvalidArgument(
          formatted("checkpoint: an input of the function ({}) has been changed in place since it "
                    "was called, or by the function itself, so that it cannot be computed from it "
                    "again; clone it before",
                    describe(*there)));
    const at::Tensor tensor = saved.unpack();
    return tensor.defined() ? tensor.detach().requires_grad_(tensor.requires_grad()) : tensor;
  }
  std::int64_t version;
  bool is_plain;
  at::Tensor plain;
  SavedVariable saved;
};

/// The function and what it was given, as long as backward may need anything that it saved. Tensors
/// have their places in the order in which they are saved, the same whenever the function is
/// called.
class CheckpointedPart : public std::enable_shared_from_this<CheckpointedPart> {
 public:
  CheckpointedPart(const std::vector<at::Tensor>& inputs, CheckpointScope::Again again,
                   bool may_leave)
      : again_(std::move(again)), may_leave_(may_leave) {
    for (const auto& input : inputs) inputs_.emplace_back(input);
  }

  /// In the first call: returns the place of a tensor that is not kept.
  std::size_t add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    Place& place = places_.emplace_back();
    place.wanted = true;
    place.sizes = tensor.sizes().vec();
    place.type = tensor.scalar_type();
    place.device = tensor.device();
    return places_.size() - 1;
  }
  /// Counts a tensor that is kept, likewise.
  void add_kept() {
    const std::lock_guard lock(mutex_);
    places_.emplace_back();
  }
  /// Ends the first call.
  void end() {
    const std::lock_guard lock(mutex_);
    ambient_.keep_what_was_used();
  }

  at::Tensor give(std::size_t place);
  /// Backward will not ask for it any more.
  void drop(std::size_t place) {
    const std::lock_guard lock(mutex_);
    places_[place].wanted = false;
    for (auto& [pass, results] : results_)
      if (place < results.size()) results[place] = KeptTensor();
  }

 private:
  class Recomputation;
  struct Place {
    bool wanted = false;
    std::vector<std::int64_t> sizes;
    at::ScalarType type = at::kFloat;
    at::Device device = at::kCPU;
  };
  using Results = std::vector<KeptTensor>;

  [[nodiscard]] Results compute(std::optional<std::size_t> only);
  void forget(int pass) {
    const std::lock_guard lock(mutex_);
    results_.erase(pass);
  }

  std::recursive_mutex mutex_;  ///< the function may start a backward pass, and come here
  const CheckpointScope::Again again_;
  const bool may_leave_;
  AmbientState ambient_;
  std::vector<CheckpointedInput> inputs_;
  std::vector<Place> places_;
  std::map<int, Results> results_;  ///< by backward pass: what it has not asked for yet
};

/// The second call: takes what is wanted, in its order.
class CheckpointedPart::Recomputation final : public SavedTensorTaker {
 public:
  Recomputation(const std::vector<Place>& places, std::optional<std::size_t> only, bool may_leave)
      : places_(places), results_(places.size()), may_leave_(may_leave) {
    for (std::size_t i = 0; i < places.size(); ++i)
      if (wants(i, only)) wanted_.push_back(i);
  }
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Taken>(*this); }
  void take(const KeptTensor& kept, const at::Tensor& tensor) {
    const std::size_t place = next_++;
    if (found_ == wanted_.size()) leave();
    if (found_ == wanted_.size() || place != wanted_[found_]) return;
    const Place& before = places_[place];
    if (tensor.sizes() != at::IntArrayRef(before.sizes) || tensor.scalar_type() != before.type ||
        tensor.device() != before.device)
      throw InvalidArgument(formatted(
          "checkpoint: the function did not do the same when it was called again: tensor {} of "
          "those that it saves for backward was {} {} and is {} now",
          place, c10::toString(before.type), to_string(Shape(before.sizes)), describe(tensor)));
    results_[place] = kept;
    if (++found_ == wanted_.size()) leave();
  }
  [[nodiscard]] Results results() && {
    if (found_ < wanted_.size())
      throw InvalidArgument(
          formatted("checkpoint: the function did not do the same when it was called again: it "
                    "saved {} tensors for backward, and {} before",
                    next_, places_.size()));
    return std::move(results_);
  }

 private:
  /// Holds the tensor for the graph of the second call, which may be used within the function.
  struct Taken final : SavedVariableHooks {
    explicit Taken(Recomputation& whose) : recomputation(whose) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      kept = KeptTensor(tensor);
      recomputation.take(kept, tensor);
    }
    at::Tensor call_unpack_hook() override { return kept.give(); }
    Recomputation& recomputation;  ///< which packs at once
    KeptTensor kept;
  };
  /// Not out of a backward pass of the function's own, which LibTorch would not count as ended.
  void leave() const {
    if (may_leave_ && torch::autograd::get_current_graph_task_id() == pass_)
      throw AllTensorsAreThere();
  }
  [[nodiscard]] bool wants(std::size_t place, std::optional<std::size_t> only) const {
    return places_[place].wanted && (!only || *only == place);
  }

  const std::vector<Place> places_;  ///< a copy: the first call may not have ended
  std::vector<std::size_t> wanted_;
  Results results_;
  const bool may_leave_;
  const int pass_ = torch::autograd::get_current_graph_task_id();
  std::size_t next_ = 0, found_ = 0;
};

CheckpointedPart::Results CheckpointedPart::compute(std::optional<std::size_t> only) {
  std::vector<at::Tensor> inputs;
  {
    const SavedTensorScope plain(nullptr);
    for (const auto& input : inputs_) inputs.push_back(input.again());
  }
  Recomputation recomputation(places_, only, may_leave_);
  {
    const at::AutoGradMode with_gradients(true);
    const AmbientState::Scope ambient(ambient_);
    const KeptStatistics statistics;
    const SavedTensorScope scope(&recomputation);
    try {
      again_(inputs);
    } catch (const AllTensorsAreThere&) {  // the rest of the function is not needed
    }
  }
  return std::move(recomputation).results();
}

at::Tensor CheckpointedPart::give(std::size_t place) {
  const std::lock_guard lock(mutex_);
  const int pass = torch::autograd::get_current_graph_task_id();
  const auto there = results_.find(pass);
  if (there != results_.end() && place < there->second.size() && there->second[place].is_there())
    return std::exchange(there->second[place], KeptTensor()).give();
  if (there != results_.end() || pass < 0) return compute(place)[place].give();  // a second time
  Results results = compute({});
  const at::Tensor tensor = std::exchange(results[place], KeptTensor()).give();
  results_[pass] = std::move(results);
  // It goes with the backward pass, also where that throws and calls no callbacks.
  std::shared_ptr<void> end(nullptr, [weak = weak_from_this(), pass](void* /*nothing*/) {
    if (const auto part = weak.lock()) part->forget(pass);
  });
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::move(end)]() mutable { end.reset(); });
  return tensor;
}

/// The first call: tensors are left out, but for parameters and other leaves, there anyway.
class CheckpointScope::Taking final : public SavedTensorTaker {
 public:
  explicit Taking(std::shared_ptr<CheckpointedPart> part) : part_(std::move(part)), scope_(this) {}
  ~Taking() override { part_->end(); }
  Taking(const Taking&) = delete;
  Taking& operator=(const Taking&) = delete;
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<LeftOut>(part_); }

 private:
  struct LeftOut final : SavedVariableHooks {
    explicit LeftOut(std::shared_ptr<CheckpointedPart> whose) : part(std::move(whose)) {}
    ~LeftOut() override {
      if (place) part->drop(*place);
    }
    LeftOut(const LeftOut&) = delete;
    LeftOut& operator=(const LeftOut&) = delete;
    void call_pack_hook(const at::Tensor& tensor) override {
      if (tensor.is_leaf() && tensor.requires_grad()) {
        kept = KeptTensor(tensor);
        part->add_kept();
      } else {
        place = part->add(tensor);
      }
    }
    at::Tensor call_unpack_hook() override { return place ? part->give(*place) : kept.give(); }
    std::shared_ptr<CheckpointedPart> part;
    std::optional<std::size_t> place;
    KeptTensor kept;
  };

  const std::shared_ptr<CheckpointedPart> part_;
  const SavedTensorScope scope_;
};

CheckpointScope::CheckpointScope(const std::vector<at::Tensor>& inputs, Again again, bool may_leave)
    : taking_(std::make_unique<Taking>(
          std::make_shared<CheckpointedPart>(inputs, std::move(again), may_leave))) {}

CheckpointScope::~CheckpointScope() = default;

}  // namespace hvd::detail
