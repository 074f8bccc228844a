// The buckets of a GradientReducer: which parameters travel together, the memory in which they do, and how gradients get there.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/bucket_layout.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/gradient_hooks.h"
#include "torch_bindings/reducer.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

/// Gradients that start travelling together: large enough to be worth a round, small enough that the first leaves early.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;
/// The first one's, where they are dealt as gradients come: it is on its way while backward has just begun.
constexpr std::size_t kFirstBucketBytes = std::size_t{1} << 20;

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

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<std::int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

}  // namespace

DataType GradientReducer::wire_type(const Slot& slot) const {
  return options_.compression.wire_type(detail::data_type_of(slot.named.parameter, slot.named.name));
}

bool GradientReducer::travels_compressed(const Slot& slot) const {
  return wire_type(slot) != detail::data_type_of(slot.named.parameter, slot.named.name);
}

void GradientReducer::deal() {
  std::vector<BucketLayout::Member> members;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  for (const auto& slot : slots_) {
    const at::Tensor& parameter = slot.named.parameter;
    const std::pair kind(parameter.scalar_type(), parameter.device());
    const auto known = std::find(kinds.begin(), kinds.end(), kind);
    members.push_back({.name = slot.named.name,
                       .bytes = static_cast<std::size_t>(parameter.numel()) * element_bytes(wire_type(slot)),
                       .kind = static_cast<int>(known - kinds.begin()),
                       .alone = slot.compressed});
    if (known == kinds.end()) kinds.push_back(kind);
  }
  const std::size_t most = std::min<std::size_t>(engine()->config().fusion_threshold_bytes, kBucketBytes);
  BucketLayout::Terms terms{
      .most_bytes = most, .first_bytes = arrivals_.is_followed() ? std::min(most, kFirstBucketBytes) : most, .order = arrivals_.order()};
  if (const auto* const count = std::get_if<int>(&options_.groups)) terms.groups = *count;
  if (const auto* const lists = std::get_if<std::vector<std::vector<at::Tensor>>>(&options_.groups)) {
    std::unordered_map<const void*, std::size_t> places;
    for (std::size_t i = 0; i < slots_.size(); ++i) places[slots_[i].named.parameter.unsafeGetTensorImpl()] = i;
    for (const auto& list : *lists) {
      auto& group = terms.lists.emplace_back();
      for (const auto& parameter : list) {
        const auto place = places.find(parameter.unsafeGetTensorImpl());
        if (place == places.end()) throw InvalidArgument("groups: a tensor that is no parameter of the optimizer");
        group.push_back(place->second);
      }
    }
  }
  buckets_.clear();
  for (auto& slots : BucketLayout::deal(members, terms)) {
    for (const auto slot : slots) slots_[slot].bucket = buckets_.size();
    Bucket bucket;
    bucket.name = formatted("{}/gradients.{}", name_, buckets_.size());  // nothing in it that ranks may have in another order
    bucket.slots = std::move(slots);
    buckets_.push_back(std::move(bucket));
  }
}

/// Buckets that follow one another on a device lie in one block, in which they are still reduced in place when they travel together.
void GradientReducer::make_room() {
  if (keeper_ != nullptr) return;
  const auto device = [this](const Bucket& bucket) { return slots_[bucket.slots.front()].named.parameter.device(); };
  for (std::size_t begin = 0, end = 0; begin < buckets_.size(); begin = end) {
    const at::Device here = device(buckets_[begin]);
    for (end = begin + 1; end < buckets_.size() && !here.is_cpu() && device(buckets_[end]) == here;) ++end;
    make_room(std::span(buckets_).subspan(begin, end - begin));
  }
  for (auto& bucket : buckets_) bucket.together = bucket.memory && (taking_ == Taking::Together || !device(bucket).is_cpu());
}

/// Not where memory is what a user wants to save: a convolution's backward pass takes a block more of each size.
bool GradientReducer::gradients_may_be_made_there() const {
  const bool saves_memory = options_.shard_optimizer_state || options_.share_parameters || keeper_ != nullptr;
  return !saves_memory && taking_ == Taking::ByDevice && options_.process_set.size() > 1;
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
  bool shared = false;  // by the ranks of the host
  if (first.named.parameter.is_cpu()) {
    memory = allocate_shared(bytes);
    shared = memory != nullptr;
    if (!shared) {
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
    if (travels_compressed(*slot) || !options_.gradients_are_views) continue;
    slot->home = slot->place = slot->wire;
    if (shared && gradients_may_be_made_there()) slot->announced = std::make_unique<detail::AnnouncedGradient>(slot->named.parameter);
  }
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
      take_in(slot, false);
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

/// The memory of the bucket is where the gradient lives again.
void GradientReducer::go_home(Slot& slot) {
  if (!slot.place.defined() || slot.home.is_same(slot.place)) return;
  slot.home = slot.wire = slot.place;
  slot.zeros_at = -1;
}

/// `just_given`: in the hook that autograd calls with it.
void GradientReducer::take_in(Slot& slot, bool just_given) {
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
  if (slot.announced && gradient.strides() == slot.place.strides() && gradient.scalar_type() == slot.place.scalar_type() &&
      detail::stays_in_shared_memory(gradient, &slot, just_given)) {
    slot.home = slot.wire = gradient = detail::watched(gradient);
    slot.zeros_at = -1;
    return;
  }
  go_home(slot);
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
  if (keeper_ != nullptr && gradient.strides() != slot.named.parameter.strides() && slot.named.parameter.is_non_overlapping_and_dense())
    gradient = at::empty_strided(gradient.sizes(), slot.named.parameter.strides(), gradient.options()).copy_(gradient);
  slot.wire = gradient.to(detail::scalar_type_of(wire_type(slot)));  // the gradient itself if that is its type
}

/// What `take_in` and `pack` do, for all of a bucket at once. What is thrown away has gone, and `.grad` may be what has come after it.
/// `other_streams`: some were written on streams that this one waits for, and their memory is those streams'.
void GradientReducer::take_in_together(Bucket& bucket, Round round, bool other_streams) {
  // In a world of one a user may change what is under way; of what is scattered each rank has another part.
  const bool by_backend = options_.process_set.size() > 1 && keeper_ == nullptr;
  std::vector<at::Tensor> from, to;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (!slot.present || slot.sparse) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (!gradient.defined() || round == Round::ThrownAway) {  // thrown away since backward gave it
      slot.given.reset();
      if (slot.home.defined() && gradient.defined() && gradient.is_alias_of(slot.home)) gradient = gradient.clone();
      slot.wire.zero_();
      continue;
    }
    if (slot.home.defined() && gradient.is_alias_of(slot.home)) continue;
    if (by_backend && slot.home.defined() && gradient.scalar_type() == slot.home.scalar_type() &&
        gradient.strides() == slot.home.strides()) {
      slot.given = std::exchange(gradient, slot.home);  // copied by the backend
      continue;
    }
    if (other_streams) detail::keep_for_current_stream(gradient);
    from.push_back(gradient);
    to.push_back(slot.wire);
    if (slot.home.defined()) gradient = slot.home;
  }
  copy_together(to, from);
  if (round == Round::ThrownAway) return;
  for (const auto index : bucket.slots)
    if (slots_[index].home.defined() && slots_[index].present) slots_[index].mark.set(slots_[index].named.parameter.grad());
}

void GradientReducer::let_go_of_given(Bucket& bucket) {
  for (const auto index : bucket.slots) slots_[index].given.reset();
}

/// While backward runs: memory of the gradients that have been copied is for others.
void GradientReducer::let_go_of_what_is_done() {
  for (auto& bucket : buckets_)
    if (bucket.submitted && bucket.together && bucket.pending->done && bucket.pending->status.ok()) let_go_of_given(bucket);
}

/// Of a submission that has failed nothing has been copied.
void GradientReducer::put_given_back(Bucket& bucket) {
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    const at::Tensor given = std::exchange(slot.given, {});
    if (!given.defined() || !gradient.defined() || !gradient.is_alias_of(slot.home)) continue;
    gradient = given;
    slot.mark.set(gradient);
  }
}

/// Parameters may have been moved since memory was made for their gradients: it is made anew. Buckets stay, unless devices have changed, or
/// the order in which gradients come is known now.
void GradientReducer::follow_parameters(Between rounds) {
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
  const bool anew = (rounds == Between::NewOrder && std::exchange(deal_anew_, false)) || to_other_device;
  if (!moved && !anew) return;
  for (auto& slot : slots_) {
    slot.kind = Kind(slot.named.parameter);
    slot.home.reset();
    slot.place.reset();
    slot.announced.reset();
    slot.wire.reset();
    slot.zeros_at = -1;
  }
  if (anew) deal();
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

}  // namespace hvd
