// The buckets of a GradientReducer: which parameters travel together, the memory in which they do, and how gradients get there.
#include <torch/torch.h>

#include <algorithm>
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

}  // namespace

void GradientReducer::deal() {
  std::vector<BucketLayout::Member> members;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  for (const auto& slot : slots_) {
    const at::Tensor& parameter = slot.named.parameter;
    const std::pair kind(parameter.scalar_type(), parameter.device());
    const auto known = std::find(kinds.begin(), kinds.end(), kind);
    members.push_back(
        {.name = slot.named.name,
         .bytes = static_cast<std::size_t>(parameter.numel()) * element_bytes(BucketMemory::wire_type(slot.named, options_.compression)),
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
    std::vector<const Named*> named;
    for (const auto index : slots) {
      slots_[index].bucket = buckets_.size();
      slots_[index].member = named.size();
      named.push_back(&slots_[index].named);
    }
    buckets_.push_back({.name = formatted("{}/gradients.{}", name_, buckets_.size()),  // nothing in it that ranks may have in another order
                        .slots = std::move(slots),
                        .memory = BucketMemory(named, memory_terms_),
                        .round = GradientRound(named.size())});
  }
}

/// Buckets that follow one another on a GPU share a block.
void GradientReducer::make_room() {
  if (keeper_ != nullptr) return;
  const auto device = [this](const Bucket& bucket) { return slots_[bucket.slots.front()].named.parameter.device(); };
  for (std::size_t begin = 0, end = 0; begin < buckets_.size(); begin = end) {
    const Bucket& first = buckets_[begin];
    const at::Device here = device(first);
    std::vector<BucketMemory*> block;
    for (end = begin; end == begin || (end < buckets_.size() && !here.is_cpu() && device(buckets_[end]) == here); ++end)
      block.push_back(&buckets_[end].memory);
    const auto lend = [&](DataType type, std::size_t bytes) { return engine()->allocate(like(first), type, bytes); };
    BucketMemory::make_room(block, taking_ == Taking::Together || !here.is_cpu(), lend);
  }
}

/// The slots for which backward has given nothing, or not as often as agreed.
void GradientReducer::take_rest(Bucket& bucket, Round round, bool early) {
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (bucket.round.is_given(slot.member)) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    const bool only_zeros = early && !bucket.round.is_awaited(slot.member) && gradient.defined();  // backward may add to them yet
    bucket.round.find(slot.member, gradient.defined() && round != Round::ThrownAway && !only_zeros);
    if (bucket.round.is_present(slot.member)) {
      if (hooked_ && !detail::has_gradient_hook(slot.named.parameter, this)) put_hook(index);  // a user's has taken its place
      share_out(slot);
      take_in(slot, false);
      pack(slot);
      slot.mark.set(gradient);
      continue;
    }
    if (bucket.memory.has_gradient(slot.member)) {  // it stays, and its memory travels
      gradient = only_zeros ? at::zeros_like(gradient) : gradient.clone();
      slot.mark.set(gradient);
    }
    if (!slot.sparse || !bucket.memory.result(slot.member).defined()) bucket.memory.fill_with_zeros(slot.member);
  }
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
  if (!slot.sparse) buckets_[slot.bucket].memory.take_in(slot.member, just_given);
}

void GradientReducer::pack(Slot& slot) {
  if (!slot.sparse) buckets_[slot.bucket].memory.pack(slot.member);
}

void GradientReducer::take_in_together(Bucket& bucket, Round round, bool other_streams) {
  std::vector<std::size_t> members;
  for (const auto index : bucket.slots)
    if (bucket.round.is_present(slots_[index].member) && !slots_[index].sparse) members.push_back(slots_[index].member);
  bucket.memory.take_in_together(members, round == Round::ThrownAway, other_streams);
  if (round == Round::ThrownAway) return;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (bucket.memory.is_home(slot.member) && bucket.round.is_present(slot.member)) slot.mark.set(slot.named.parameter.grad());
  }
}

void GradientReducer::put_given_back(Bucket& bucket) {
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    if (bucket.memory.put_given_back(slot.member)) slot.mark.set(slot.named.parameter.grad());
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
  for (auto& slot : slots_) slot.kind = Kind(slot.named.parameter);
  for (auto& bucket : buckets_) bucket.memory.give_up();
  if (anew) deal();
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
  std::vector<std::size_t> members;
  for (const auto index : bucket.slots) {
    const Slot& slot = slots_[index];
    if (!bucket.round.pending()->present_anywhere[slot.member] || bucket.round.is_kept(slot.member)) continue;
    if (!bucket.round.is_late(slot.member)) {
      members.push_back(slot.member);
      continue;
    }
    // What the others have together, which is the same on all ranks, and what is to come.
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    gradient.add_(bucket.memory.result(slot.member).to(gradient.scalar_type()), sums() ? 1.0 / options_.process_set.size() : 1.0);
  }
  bucket.memory.give_back(members);
}

}  // namespace hvd
