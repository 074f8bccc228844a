#include "torch_bindings/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "hvd/engine.h"
#include "hvd/text.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/device.h"
#include "torch_bindings/gradient_hooks.h"
#include "torch_bindings/join.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

/// Gradients that start travelling together: large enough to be worth a round, small enough that the first leaves early.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;

/// Each pair of types by itself: where the first of `to` chose the kernel for all, the others were wrong (PyTorch issue 173383).
void copy_together(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> by_types;
  for (std::size_t i = 0; i < to.size(); ++i) {
    auto& [theirs, mine] = by_types[{to[i].scalar_type(), from[i].scalar_type()}];
    theirs.push_back(to[i]);
    mine.push_back(from[i]);
  }
  for (auto& [types, tensors] : by_types) at::_foreach_copy_(tensors.first, tensors.second);
}

/// As many rounds between two steps are told apart.
constexpr std::size_t kMostRoundsTold = 8;

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<std::int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

bool is_zero(const at::Tensor& gradient) { return gradient.layout() == at::kStrided && !gradient.any().item<bool>(); }

}  // namespace

GradientReducer::GradientReducer(std::vector<Named> parameters, DistributedOptimizerOptions options, int number, const std::string& kind,
                                 Taking taking, const std::string& part)
    : options_(std::move(options)),
      taking_(taking),
      kind_(kind),
      name_(formatted("{}.{}{}", kind, number, part)),
      passes_per_step_(options_.backward_passes_per_step) {
  for (auto& named : parameters) {
    Slot& slot = slots_.emplace_back(std::move(named));
    slot.compressed = GradientCompressor::takes(options_.compression, slot.named.parameter);
    reduced_on_.add(slot.named.parameter);
  }
  make_compressor();
  deal(options_);
  const at::NoGradGuard no_gradient;
  make_room();
}

void GradientReducer::make_compressor() {
  if (!options_.compression.needs_memory()) return;
  GradientCompressor::Parameters parameters;
  for (const auto& slot : slots_)
    if (slot.compressed) parameters.emplace_back(slot.named.name, slot.named.parameter);
  compressor_ = GradientCompressor::make({.compression = options_.compression,
                                          .op = options_.op,
                                          .predivide_factor = options_.gradient_predivide_factor,
                                          .process_set = options_.process_set,
                                          .name = formatted("{}/compressed", name_)},
                                         std::move(parameters));
}

std::vector<at::Tensor> GradientReducer::compression_memory() const {
  return compressor_ ? compressor_->memory() : std::vector<at::Tensor>{};
}

std::uint64_t GradientReducer::bytes_sent() const {
  const std::lock_guard lock(mutex_);
  return bytes_sent_ + (compressor_ ? compressor_->bytes_sent() : 0);
}

DataType GradientReducer::wire_type(const Slot& slot) const {
  return options_.compression.wire_type(detail::data_type_of(slot.named.parameter, slot.named.name));
}

bool GradientReducer::travels_compressed(const Slot& slot) const {
  return wire_type(slot) != detail::data_type_of(slot.named.parameter, slot.named.name);
}

void GradientReducer::add_bucket(std::vector<std::size_t> slots) {
  std::erase_if(slots, [this](std::size_t slot) { return slots_[slot].compressed; });
  if (slots.empty()) return;
  // A bucket is of one type and on one device; a group of the user's may be neither.
  const auto kind = [this](std::size_t slot) {
    const at::Tensor& parameter = slots_[slot].named.parameter;
    return std::pair(parameter.scalar_type(), parameter.device());
  };
  const auto others =
      std::stable_partition(slots.begin(), slots.end(), [&, first = kind(slots.front())](std::size_t slot) { return kind(slot) == first; });
  std::vector<std::size_t> rest(others, slots.end());
  slots.erase(others, slots.end());
  for (const auto slot : slots) slots_[slot].bucket = buckets_.size();
  Bucket bucket;
  bucket.name = formatted("{}/gradients.{} ({}{})", name_, buckets_.size(), slots_[slots.front()].named.name,
                          slots.size() > 1 ? formatted(" and {} more", slots.size() - 1) : "");
  bucket.slots = std::move(slots);
  buckets_.push_back(std::move(bucket));
  add_bucket(std::move(rest));
}

void GradientReducer::deal(const DistributedOptimizerOptions& options) {
  std::vector<bool> dealt(slots_.size(), false);
  if (const auto* lists = std::get_if<std::vector<std::vector<at::Tensor>>>(&options.groups)) {
    std::unordered_map<const void*, std::size_t> places;
    for (std::size_t i = 0; i < slots_.size(); ++i) places[slots_[i].named.parameter.unsafeGetTensorImpl()] = i;
    for (const auto& list : *lists) {
      std::vector<std::size_t> group;
      for (const auto& parameter : list) {
        const auto place = places.find(parameter.unsafeGetTensorImpl());
        if (place == places.end()) throw InvalidArgument("groups: a tensor that is no parameter of the optimizer");
        if (std::find(group.begin(), group.end(), place->second) != group.end()) continue;  // tied: the module lists it twice
        if (dealt[place->second])
          throw InvalidArgument(formatted("groups: parameter '{}' is in two groups", slots_[place->second].named.name));
        dealt[place->second] = true;
        group.push_back(place->second);
      }
      add_bucket(std::move(group));
    }
  } else if (const auto* count = std::get_if<int>(&options.groups)) {
    if (*count < 1) throw InvalidArgument(formatted("groups: {} is not a number of groups", *count));
    const std::size_t per_group = (slots_.size() + static_cast<std::size_t>(*count) - 1) / static_cast<std::size_t>(*count);
    for (std::size_t begin = 0; begin < slots_.size(); begin += per_group) {
      std::vector<std::size_t> group;
      for (std::size_t i = begin; i < std::min(begin + per_group, slots_.size()); ++i) {
        group.push_back(i);
        dealt[i] = true;
      }
      add_bucket(std::move(group));
    }
  }
  // By size, last parameters first: backward gives their gradients first.
  const std::size_t limit = std::min<std::size_t>(engine()->config().fusion_threshold_bytes, kBucketBytes);
  std::vector<std::size_t> group;
  std::size_t bytes = 0;
  for (std::size_t i = slots_.size(); i-- > 0;) {
    if (dealt[i] || slots_[i].compressed) continue;
    const at::Tensor& parameter = slots_[i].named.parameter;
    const std::size_t more = static_cast<std::size_t>(parameter.numel()) * element_bytes(wire_type(slots_[i]));
    const bool other_kind = !group.empty() && (slots_[group.back()].named.parameter.scalar_type() != parameter.scalar_type() ||
                                               slots_[group.back()].named.parameter.device() != parameter.device());
    if (bytes + more > limit || other_kind) {
      add_bucket(std::exchange(group, {}));
      bytes = 0;
    }
    group.push_back(i);
    bytes += more;
  }
  add_bucket(std::move(group));
}

/// Buckets that follow one another on a device lie in one block, in which they are still reduced in place when they travel together.
void GradientReducer::make_room() {
  const auto device = [this](const Bucket& bucket) { return slots_[bucket.slots.front()].named.parameter.device(); };
  for (std::size_t begin = 0, end = 0; begin < buckets_.size(); begin = end) {
    const at::Device here = device(buckets_[begin]);
    for (end = begin + 1; end < buckets_.size() && !here.is_cpu() && device(buckets_[end]) == here;) ++end;
    make_room(std::span(buckets_).subspan(begin, end - begin));
  }
  for (auto& bucket : buckets_) bucket.together = bucket.memory && (taking_ == Taking::Together || !device(bucket).is_cpu());
}

void GradientReducer::make_room(std::span<Bucket> buckets) {
  std::vector<std::pair<Slot*, std::size_t>> offsets;
  std::size_t bytes = 0;
  for (const auto& bucket : buckets) {
    for (const auto index : bucket.slots) {
      Slot& slot = slots_[index];
      if (slot.named.parameter.device() != slots_[buckets.front().slots.front()].named.parameter.device()) return;
      offsets.emplace_back(&slot, bytes);
      bytes += aligned_to_member(static_cast<std::size_t>(slot.named.parameter.numel()) * element_bytes(wire_type(slot)));
    }
  }
  bytes = std::max<std::size_t>(bytes, kMemberAlignment);
  const Slot& first = *offsets.front().first;
  std::shared_ptr<void> memory;
  if (first.named.parameter.is_cpu()) {
    memory = allocate_shared(bytes);
    if (!memory) {
      const at::Tensor ordinary = at::empty({static_cast<std::int64_t>(bytes + kMemberAlignment)}, at::kByte);
      memory = std::shared_ptr<void>(ordinary.mutable_data_ptr(), [ordinary](void*) {});
    }
  } else {
    memory = engine()->allocate(like(buckets.front()), wire_type(first), bytes);
    if (!memory) return;
  }
  for (auto& bucket : buckets) bucket.memory = memory;
  for (const auto& [slot, offset] : offsets) {
    slot->wire = detail::watched(detail::view_of(memory, offset, slot->named.parameter, detail::scalar_type_of(wire_type(*slot))));
    if (!travels_compressed(*slot) && options_.gradients_are_views) slot->home = slot->wire;
  }
}

/// By parameter, how many wrappers of each kind. A wrapper holds its parameters, so their addresses are not given to others.
struct GradientReducer::Claims {
  std::mutex mutex;
  std::unordered_map<const void*, std::map<std::string, int>> kinds;
};

std::shared_ptr<GradientReducer::Claims> GradientReducer::claims() {
  static const auto all = std::make_shared<Claims>();
  return all;
}

void GradientReducer::refuse_twice(const std::vector<Named>& parameters, const std::string& kind) {
  const auto title = [](const std::string& of) { return of == "ddp" ? "DistributedDataParallel" : "DistributedOptimizer"; };
  const auto all = claims();
  const std::lock_guard lock(all->mutex);
  for (const auto& [name, parameter] : parameters) {
    const auto claimed = all->kinds.find(parameter.unsafeGetTensorImpl());
    if (claimed == all->kinds.end()) continue;
    for (const auto& [other, count] : claimed->second)
      if (other != kind)
        throw InvalidArgument(
            formatted("{}: the gradient of parameter '{}' is reduced by a {} already, and would be reduced twice; end that "
                      "one first, or use the optimizer alone, which can shard and compress, too",
                      title(kind), name, title(other)));
  }
}

void GradientReducer::hook() {
  if (!std::exchange(hooked_, true)) {
    const std::lock_guard lock(claims_->mutex);
    for (const auto& slot : slots_) ++claims_->kinds[slot.named.parameter.unsafeGetTensorImpl()][kind_];
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) put_hook(i);
}

void GradientReducer::put_hook(std::size_t slot) {
  detail::add_gradient_hook(slots_[slot].named.parameter, this, [weak = weak_from_this(), slot] {
    if (const auto self = weak.lock()) self->on_gradient(slot);
  });
}

void GradientReducer::give_up_claims() noexcept {
  if (!std::exchange(hooked_, false)) return;
  const std::lock_guard lock(claims_->mutex);
  for (const auto& slot : slots_) {
    const auto claimed = claims_->kinds.find(slot.named.parameter.unsafeGetTensorImpl());
    if (--claimed->second[kind_] == 0) claimed->second.erase(kind_);
    if (claimed->second.empty()) claims_->kinds.erase(claimed);
  }
}

void GradientReducer::unhook() {
  give_up_claims();
  for (auto& slot : slots_) {
    detail::remove_gradient_hook(slot.named.parameter, this);
    if (slot.before_hook) slot.named.parameter.remove_hook(*std::exchange(slot.before_hook, {}));
  }
}

void GradientReducer::listen(bool on) {
  const std::lock_guard lock(mutex_);
  listening_ = on;
}

/// In a backward pass: the other ranks may go on, so this one takes part in the round before it forgets it.
void GradientReducer::refuse(const std::string& text) {
  interrupted_ = true;
  throw InvalidArgument(text);
}

void GradientReducer::on_gradient(std::size_t index) {
  const bool wanted = !wanted_ || wanted_();
  const std::lock_guard lock(mutex_);
  if (!listening_) return;
  Slot& slot = slots_[index];
  if (!wanted) {
    if (!slot.ready) return;
    refuse(
        formatted("gradient of '{}': another backward pass within the one that is being reduced (a checkpointed part, say) has added to "
                  "it after it had left; use the parameter in one of them only, or make the pass under no_sync()",
                  slot.named.name));
  }
  const at::Tensor& gradient = slot.named.parameter.grad();
  if (!gradient.defined()) return;
  if (gradient.requires_grad())
    refuse(
        formatted("gradient of '{}': backward(create_graph = true) gave a gradient that can be differentiated itself, which a reduction "
                  "would lose; take such gradients by torch::autograd::grad, and call backward() without create_graph on the loss that "
                  "they are part of",
                  slot.named.name));
  const at::NoGradGuard no_gradient;
  begin_pass(slot);
  const auto since = slot.mark.since(gradient);
  if (slot.passes > 0 && !slot.ready && since == detail::GradientMark::Since::Replaced && !slot.sparse) slot.passes = 0;
  if (slot.passes >= passes_per_step_)
    refuse(
        formatted("gradient of '{}': more than {} backward passes without step(); raise backward_passes_per_step or call "
                  "step(), synchronize() or the optimizer's zero_grad() in between (the module's is recognised only where it drops all "
                  "gradients of the optimizer)",
                  slot.named.name, passes_per_step_));
  synchronized_ = false;
  ++slot.passes;
  if (std::exchange(slot.reduced, false) && sums()) {
    if (!slot.before_hook)
      refuse(
          formatted("gradient of '{}': it was added to one that is a sum over the ranks already; call the "
                    "optimizer's zero_grad() first",
                    slot.named.name));
    const double ranks = options_.process_set.size();
    if (slot.before.defined()) slot.named.parameter.mutable_grad().sub_(slot.before, (ranks - 1) / ranks);  // this rank's part of the sum
  }
  slot.before.reset();
  count(slot);
  slot.mark.set(slot.named.parameter.grad());
}

/// The gradient is there: takes it in, and submits its bucket if it was the last one.
void GradientReducer::count(Slot& slot) {
  if (slot.compressed) {
    slot.ready = slot.passes == passes_per_step_;
    return;
  }
  Bucket& bucket = buckets_[slot.bucket];
  if (bucket.submitted && !slot.ready) {
    slot.late = !slot.sparse && !slot.named.parameter.grad().is_sparse();
    return;
  }
  take_in(slot);
  if (slot.passes < passes_per_step_) return;
  pack(slot);
  slot.ready = slot.present = true;
  if (!bucket.counted) {
    bucket.counted = true;
    bucket.missing = 0;
    for (const auto index : bucket.slots) {
      const at::Tensor& left = slots_[index].named.parameter.grad();
      slots_[index].awaited = slots_[index].named.parameter.requires_grad() || (left.defined() && (!left.is_cpu() || !is_zero(left)));
      if (slots_[index].awaited) ++bucket.missing;
    }
  }
  if (slot.awaited) --bucket.missing;
  if (bucket.missing > 0) return;
  take_rest(bucket, Round::Kept, true);
  submit(bucket, false);
}

/// With Sum: what a round gave must not be summed again with what is added to it now.
void GradientReducer::before_gradient(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!listening_ || !slot.reduced) return;
  const at::Tensor& gradient = slot.named.parameter.grad();
  const auto since = slot.mark.since(gradient);
  const bool there = since == detail::GradientMark::Since::Same || since == detail::GradientMark::Since::Changed;
  slot.before = there ? gradient.detach().clone() : at::Tensor();
}

/// At the first gradient of a backward pass: whether it starts anew what an earlier pass gave.
void GradientReducer::begin_pass(const Slot& first) {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass != std::exchange(last_pass_, pass) && fate_of_gradients(&first).first == Fate::ThrownAway) throw_away();
  if (!std::exchange(round_begun_, true)) follow_parameters();
}

bool GradientReducer::is_under_way(const Slot& slot) const {
  if (slot.compressed || slot.late) return false;
  return slot.ready || (slot.present && buckets_[slot.bucket].submitted);
}

/// What has become of the gradients that are under way, and the first that is not as it was left. `just_given`: backward has added to
/// this one since.
std::pair<GradientReducer::Fate, const GradientReducer::Slot*> GradientReducer::fate_of_gradients(const Slot* just_given) const {
  using Since = detail::GradientMark::Since;
  std::size_t under_way = 0, gone = 0;
  const Slot* changed = nullptr;
  for (const auto& slot : slots_) {
    if (!is_under_way(slot)) continue;
    ++under_way;
    const at::Tensor& gradient = slot.named.parameter.grad();
    const Since since = slot.mark.since(gradient);
    if (since == Since::Same) continue;
    if (since == Since::Changed && (slot.sparse || &slot == just_given)) continue;  // sparse ones leave later
    if (since != Since::Changed && (!gradient.defined() || &slot == just_given || is_zero(gradient))) ++gone;
    if (changed == nullptr) changed = &slot;
  }
  if (changed == nullptr) return {Fate::Untouched, nullptr};
  return {gone == under_way ? Fate::ThrownAway : Fate::Changed, changed};
}

/// The other ranks may wait for what this one has given, or this one has not: the round is made, and what it gives dropped.
void GradientReducer::throw_away() {
  reduce(Round::ThrownAway);
  forget();
  for (auto& slot : slots_) slot.reduced = false;
  ++rounds_;
}

/// In a world of one, where nothing is added: what a user has made of gradients that are under way is what counts.
void GradientReducer::keep_changes() {
  for (auto& slot : slots_)
    slot.users = is_under_way(slot) && slot.mark.since(slot.named.parameter.grad()) != detail::GradientMark::Since::Same;
}

/// Whether a user has put gradients where a round gave others, or none.
bool GradientReducer::given_anew() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.mark.since(slot.named.parameter.grad()) == detail::GradientMark::Since::Replaced;
  });
}

/// What is a sum over the ranks already enters the next one in equal parts.
void GradientReducer::share_out(Slot& slot) {
  at::Tensor& gradient = slot.named.parameter.mutable_grad();
  if (!std::exchange(slot.reduced, false) || !sums() || !gradient.defined()) return;
  if (slot.mark.since(gradient) != detail::GradientMark::Since::Replaced) gradient.div_(options_.process_set.size());
}

/// The slots for which backward has given nothing, or not as often as agreed.
void GradientReducer::take_rest(Bucket& bucket, Round round, bool early) {
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (slot.ready) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    const bool only_zeros = early && !slot.awaited && gradient.defined();  // backward may add to them yet
    slot.present = gradient.defined() && round != Round::ThrownAway && !only_zeros;
    if (slot.present) {
      if (hooked_ && !detail::has_gradient_hook(slot.named.parameter, this)) put_hook(index);  // a user's has taken its place
      share_out(slot);
      take_in(slot);
      pack(slot);
      slot.mark.set(gradient);
      continue;
    }
    if (slot.home.defined() && gradient.defined() && gradient.is_alias_of(slot.home)) {  // it stays, and its memory travels
      gradient = only_zeros ? at::zeros_like(gradient) : gradient.clone();
      slot.mark.set(gradient);
    }
    if (slot.sparse && slot.wire.defined()) continue;
    fill_with_zeros(slot, bucket.memory != nullptr);
  }
}

void GradientReducer::fill_with_zeros(Slot& slot, bool in_memory) {
  if (!in_memory) {
    slot.wire = at::zeros_like(slot.named.parameter,
                               slot.named.parameter.options().requires_grad(false).dtype(detail::scalar_type_of(wire_type(slot))));
    return;
  }
  if (slot.zeros_at >= 0 && slot.zeros_at == version_of(slot.wire)) return;
  slot.wire.zero_();
  slot.zeros_at = version_of(slot.wire);
}

void GradientReducer::take_in(Slot& slot) {
  at::Tensor& gradient = slot.named.parameter.mutable_grad();
  if (gradient.is_sparse()) {
    if (!options_.sparse_as_dense) {
      slot.sparse = true;
      return;
    }
    gradient = gradient.to_dense();
  }
  if (slot.sparse || buckets_[slot.bucket].together) return;
  if (!slot.home.defined() || gradient.is_alias_of(slot.home)) return;
  slot.home.copy_(gradient);  // the gradient has just been written: this reads it from the cache
  gradient = slot.home;
}

void GradientReducer::pack(Slot& slot) {
  if (slot.home.defined() || slot.sparse) return;
  at::Tensor& gradient = slot.named.parameter.mutable_grad();
  gradient = detail::watched(gradient);
  if (buckets_[slot.bucket].together) return;
  if (slot.named.parameter.is_cpu()) {
    slot.wire.copy_(gradient);
    return;
  }
  if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
  slot.wire = gradient.to(detail::scalar_type_of(wire_type(slot)));  // the gradient itself if that is its type
}

/// What `take_in` and `pack` do, for all of a bucket at once.
void GradientReducer::take_in_together(Bucket& bucket) {
  std::vector<at::Tensor> from, to;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (!slot.present || slot.sparse) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (!gradient.defined()) {  // thrown away since backward gave it
      slot.wire.zero_();
      continue;
    }
    if (slot.home.defined() && gradient.is_alias_of(slot.home)) continue;
    from.push_back(gradient);
    to.push_back(slot.wire);
    if (slot.home.defined()) gradient = slot.home;
  }
  copy_together(to, from);
  for (const auto index : bucket.slots)
    if (slots_[index].home.defined() && slots_[index].present) slots_[index].mark.set(slots_[index].named.parameter.grad());
}

/// How gradients become their average or sum: of a Submission or of AllreduceOptions.
template <class Terms>
void GradientReducer::scale(Terms& terms) const {
  terms.op = options_.op;
  if (options_.gradient_predivide_factor == 1) return;
  terms.op = ReduceOp::Sum;
  terms.prescale_factor = 1 / options_.gradient_predivide_factor;
  terms.postscale_factor = options_.gradient_predivide_factor / options_.process_set.size();
}

/// How the bucket is submitted, without its tensors.
Submission GradientReducer::like(const Bucket& bucket) const {
  Submission submission;
  submission.kind = OpKind::Allreduce;
  submission.name = bucket.name;
  submission.process_set = options_.process_set.id();
  scale(submission);
  submission.device = detail::device_of(slots_[bucket.slots.front()].named.parameter);
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  return submission;
}

void GradientReducer::submit(Bucket& bucket, bool wait_follows) {
  const auto running = engine();
  if (bucket.together) take_in_together(bucket);
  Submission submission = like(bucket);
  std::vector<std::shared_ptr<void>> kept;
  const auto ranks = static_cast<std::uint64_t>(options_.process_set.size());
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (!slot.wire.defined()) slot.wire = at::empty({0}, slot.named.parameter.options().dtype(detail::scalar_type_of(wire_type(slot))));
    if (!slot.sparse) bytes_sent_ += 2 * slot.wire.nbytes() * (ranks - 1) / ranks;
    TensorArgument argument = detail::argument(slot.wire, slot.wire, slot.named.name);
    argument.present = slot.present && !slot.sparse;
    if (slot.sparse) argument.shape = {0};  // says so to the others
    argument.name = slot.named.name;
    argument.padded = bucket.memory != nullptr;
    submission.tensors.push_back(std::move(argument));
    kept.push_back(std::make_shared<at::Tensor>(slot.wire));
  }
  if (&bucket == &buckets_.front() && !announced_.empty()) {
    const Slot& first = slots_[bucket.slots.front()];
    const auto nothing = std::make_shared<at::Tensor>(at::empty({0}, first.wire.options()));
    TensorArgument argument = detail::argument(*nothing, *nothing, "");
    argument.shape = announced_;
    argument.shape.push_back(0);
    argument.name = formatted("how many parameters each group of {} has", name_);
    submission.tensors.push_back(std::move(argument));
    kept.push_back(nothing);
    announcing_ = true;
  }
  Shape& tells_the_round = submission.tensors.front().shape;
  tells_the_round.insert(tells_the_round.begin(), std::min(rounds_, kMostRoundsTold), 1);
  if (auto event = detail::ready_event(slots_[bucket.slots.front()].wire)) {
    for (auto& argument : submission.tensors) argument.ready_event = event.get();
    kept.push_back(std::move(event));
  }
  submission.keep_alive = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept));
  bucket.pending = running->submit(std::move(submission), wait_follows ? After::Wait : After::Return);
  bucket.submitted = true;
}

void GradientReducer::synchronize() {
  if (synchronize_gradients() && join_) end_join_round();
}

void GradientReducer::set_join(std::shared_ptr<detail::JoinRounds> join) { join_ = std::move(join); }

void GradientReducer::end_join_round() {
  const double factor = join_->end_round();
  if (factor == 1 || options_.op != ReduceOp::Average) return;
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  for (auto& slot : slots_) {
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    gradient.mul_(factor);
    slot.mark.set(gradient);
  }
}

std::vector<std::pair<std::string, at::Tensor>> GradientReducer::parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& slot : slots_) all.emplace_back(slot.named.name, slot.named.parameter);
  return all;
}

/// False if there was nothing to reduce.
bool GradientReducer::synchronize_gradients() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  if (synchronized_ && !given_anew()) return false;
  const auto [fate, changed] = fate_of_gradients();
  const bool alone = options_.process_set.size() == 1;
  if (alone) keep_changes();
  if (fate == Fate::ThrownAway && !alone) throw_away();
  reduce_until_none_is_late();
  if (fate != Fate::Changed || alone) return true;
  synchronized_ = false;
  throw InvalidArgument(
      formatted("gradient of '{}': it was changed after backward() while its reduction was under way, so what all ranks got is not "
                "their average or sum; call synchronize() before clipping or changing gradients (hvd::clip_grad_norm_ does), and the "
                "optimizer's zero_grad() to throw them away",
                changed->named.name));
}

void GradientReducer::finish_pass() {
  {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_gradient;
    rounds_ = 0;
    reduce_until_none_is_late();
    rounds_ = 0;
  }
  if (join_) end_join_round();
}

void GradientReducer::reduce_until_none_is_late() {
  for (bool again = true; again;) {
    again = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.late; });
    synchronized_ = false;
    reduce(Round::Kept);
    finish(Round::Kept);
    ++rounds_;
  }
  synchronized_ = true;
  follow_parameters();
}

void GradientReducer::submit_all(Round round) {
  for (auto& bucket : buckets_) {
    if (bucket.submitted) continue;
    take_rest(bucket, round, false);
    submit(bucket, true);
  }
}

/// One round. Throws what the first failed bucket threw, when all are over.
void GradientReducer::reduce(Round round) {
  const auto running = engine();
  if (!std::exchange(round_begun_, true)) follow_parameters();
  submit_all(round);
  std::exception_ptr first;
  try {
    if (compressor_ && round == Round::Kept) {
      for (auto& slot : slots_)
        if (slot.compressed) share_out(slot);
      compressor_->reduce();
    }
  } catch (...) {
    first = std::current_exception();
  }
  for (auto& bucket : buckets_) {
    try {
      wait_for(bucket);
      detail::wait_on_current_stream(slots_[bucket.slots.front()].named.parameter, bucket.pending->completions);
      if (round != Round::ThrownAway) give_back(bucket);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  try {
    if (!first) reduce_sparse(round);
  } catch (...) {
    first = std::current_exception();
  }
  if (!first) return;
  for (auto& slot : slots_) slot.reduced = false;
  forget();
  std::rethrow_exception(first);
}

/// After a round that went well: what it gave is not to be summed again.
void GradientReducer::finish(Round round) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const at::Tensor& gradient = slot.named.parameter.grad();
    slot.reduced = gradient.defined() && !slot.late && (round == Round::Kept || !slot.compressed);
    slot.mark.set(gradient);
    if (!sums() || !slot.reduced || slot.before_hook || !hooked_ || !slot.named.parameter.requires_grad()) continue;
    slot.before_hook = slot.named.parameter.register_hook([weak = weak_from_this(), i](const at::Tensor& /*given*/) {
      if (const auto self = weak.lock()) self->before_gradient(i);
    });
  }
  forget();
}

/// Parameters may have been moved since memory was made for their gradients: it is made anew. Buckets stay, unless devices have changed.
void GradientReducer::follow_parameters() {
  bool moved = false, to_other_device = false;
  for (auto& slot : slots_) {
    const at::Tensor& parameter = slot.named.parameter;
    if (slot.kind.is_of(parameter)) continue;
    const bool other_device = slot.kind.device != parameter.device();
    if (slot.compressed && (other_device || parameter.sizes() != at::IntArrayRef(slot.kind.sizes)))
      throw InvalidArgument(formatted(
          "parameter '{}' has got another device or shape since its optimizer was wrapped, and what {} remembers of its gradients "
          "does not fit any more; change the model first and wrap the optimizer then",
          slot.named.name, "its compression"));
    convert_gradient(slot);
    moved = true;
    to_other_device = to_other_device || other_device;
  }
  if (!moved) return;
  for (auto& slot : slots_) {
    slot.kind = Kind(slot.named.parameter);
    slot.home.reset();
    slot.wire.reset();
    slot.zeros_at = -1;
  }
  if (to_other_device) {
    buckets_.clear();
    deal(options_);
  }
  for (auto& bucket : buckets_) bucket.memory.reset();
  make_room();
}

/// To what the parameter is now.
void GradientReducer::convert_gradient(Slot& slot) {
  const at::Tensor& parameter = slot.named.parameter;
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) return;
  if (gradient.sizes() != parameter.sizes())
    throw InvalidArgument(formatted("parameter '{}' is {} now, and its gradient {}; call zero_grad() when a parameter gets another shape",
                                    slot.named.name, to_string(Shape(parameter.sizes().vec())), to_string(Shape(gradient.sizes().vec()))));
  gradient = gradient.to(parameter.device(), parameter.scalar_type());
  slot.mark.set(gradient);
}

void GradientReducer::wait_for(Bucket& bucket) {
  const auto running = engine();
  try {
    running->wait(*bucket.pending);
  } catch (const Mismatch& error) {
    // The ranks may differ just in who knows that a gradient is sparse. Then all know now, and try again.
    if (options_.sparse_as_dense || !learn_sparse(bucket)) {
      if (rounds_ == 0) throw;
      throw Mismatch(
          formatted("{} (a dimension of 1 in front stands for each time that a rank has reduced gradients since its last step() "
                    "or zero_grad(): the ranks must agree in that)",
                    error.what()));
    }
    submit(bucket, true);
    running->wait(*bucket.pending);
  }
  if (&bucket == &buckets_.front() && std::exchange(announcing_, false)) announced_.clear();
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (bucket.pending->present_anywhere[i]) slots_[bucket.slots[i]].zeros_at = -1;
}

void GradientReducer::announce(Shape layout) {
  const std::lock_guard lock(mutex_);
  announced_ = std::move(layout);
}

/// Whether that brought anything new to any rank. All ranks of the set must call it.
bool GradientReducer::learn_sparse(Bucket& bucket) {
  at::Tensor known = at::zeros({static_cast<std::int64_t>(bucket.slots.size())}, at::kInt);
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (slots_[bucket.slots[i]].sparse) known[static_cast<std::int64_t>(i)] = 1;
  const AllreduceOptions most{.name = bucket.name + "/sparse", .op = ReduceOp::Max, .process_set = options_.process_set};
  const AllreduceOptions least{.name = bucket.name + "/not sparse", .op = ReduceOp::Min, .process_set = options_.process_set};
  at::Tensor anywhere;
  at::Tensor everywhere;
  try {
    anywhere = allreduce(known, most);
    everywhere = allreduce(known, least);
  } catch (const Mismatch&) {
    return false;  // not even as many parameters
  }
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (anywhere[static_cast<std::int64_t>(i)].item<int>() != 0) slots_[bucket.slots[i]].sparse = true;
  return !anywhere.equal(everywhere);
}

void GradientReducer::reduce_sparse(Round round) {
  std::vector<std::pair<Slot*, Handle<at::Tensor>>> under_way;
  for (auto& slot : slots_) {
    if (!slot.sparse) continue;
    if (round != Round::ThrownAway) share_out(slot);
    const at::Tensor& parameter = slot.named.parameter;
    const at::Tensor& gradient = parameter.grad();
    const at::Tensor mine = !gradient.defined()    ? at::zeros_like(parameter, parameter.options().requires_grad(false)).to_sparse(1)
                            : gradient.is_sparse() ? gradient
                                                   : gradient.to_sparse(1);
    AllreduceOptions options{.name = formatted("{}/sparse gradient of {}", name_, slot.named.name),
                             .process_set = options_.process_set,
                             .compression = options_.compression};
    scale(options);
    under_way.emplace_back(&slot, sparse_allreduce_async(mine, options));
  }
  for (auto& [slot, handle] : under_way) {
    const at::Tensor sum = handle.wait();
    if (round == Round::ThrownAway) continue;
    at::Tensor& gradient = slot->named.parameter.mutable_grad();
    if (gradient.defined() || sum._nnz() > 0) gradient = sum;
  }
}

void GradientReducer::give_back(Bucket& bucket) {
  std::vector<at::Tensor> from, to;
  for (std::size_t i = 0; i < bucket.slots.size(); ++i) {
    Slot& slot = slots_[bucket.slots[i]];
    if (!bucket.pending->present_anywhere[i] || slot.users) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (slot.late) {  // what the others have together, which is the same on all ranks, and what is to come
      gradient.add_(slot.wire.to(gradient.scalar_type()), sums() ? 1.0 / options_.process_set.size() : 1.0);
      continue;
    }
    if (slot.home.defined()) {
      if (!gradient.defined() || !gradient.is_alias_of(slot.home)) gradient = slot.home;
      continue;
    }
    if (gradient.defined() && gradient.is_alias_of(slot.wire)) continue;
    if (!gradient.defined()) gradient = at::empty_like(slot.wire, slot.wire.options().dtype(slot.kind.type));
    from.push_back(slot.wire);
    to.push_back(gradient);
  }
  copy_together(to, from);
}

void GradientReducer::forget() {
  for (auto& slot : slots_) {
    slot.passes = 0;
    slot.ready = slot.present = slot.late = slot.users = false;
  }
  for (auto& bucket : buckets_) {
    bucket.counted = bucket.submitted = false;
    bucket.pending.reset();
  }
  round_begun_ = interrupted_ = false;
}

bool GradientReducer::is_synchronized() const {
  const std::lock_guard lock(mutex_);
  return synchronized_;
}

void GradientReducer::settle() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  // Other ranks may have submitted buckets that this one has not, and wait for them in their own zero_grad: all take part in all.
  const bool gathered = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.ready && !slot.compressed; });
  if (gathered || interrupted_) reduce(Round::KeptButCompressed);
  forget();
  for (auto& slot : slots_) slot.reduced = false;
  synchronized_ = false;
  rounds_ = 0;
}

void GradientReducer::begin_step() {
  const std::lock_guard lock(mutex_);
  forget();
  synchronized_ = false;
  rounds_ = 0;
}

void GradientReducer::begin_evaluation() {
  const std::lock_guard lock(mutex_);
  synchronized_ = false;
  rounds_ = 0;
}

void GradientReducer::set_passes(int passes) {
  const std::lock_guard lock(mutex_);
  passes_per_step_ = passes;
}

at::Tensor GradientReducer::reduce_loss(const at::Tensor& loss) const {
  return allreduce(loss.detach(), {.name = formatted("{}/loss", name_), .op = options_.op, .process_set = options_.process_set});
}

}  // namespace hvd
