// How the buckets of a GradientReducer are dealt, and how gradients get into them.
#include "torch_bindings/reducer/reducer_buckets.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/encodings.h"
#include "torch_bindings/gradients/bucket_layout.h"
#include "torch_bindings/gradients/gradient_hooks.h"

namespace hvd {

namespace {

/// Gradients that start travelling together: large enough to be worth a round, small enough that
/// the first leaves early.
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;
/// The first one's, where they are dealt as gradients come: it is on its way while backward has
/// just begun.
constexpr std::size_t kFirstBucketBytes = std::size_t{1} << 20;

std::unique_ptr<GradientCompressor> compressor_of(const std::vector<GradientSlot>& slots,
                                                  const DistributedOptimizerOptions& options,
                                                  const std::string& name) {
  if (!options.compression.needs_memory()) return nullptr;
  GradientCompressor::Parameters parameters;
  for (const auto& slot : slots)
    if (slot.compressed) parameters.emplace_back(slot.named.name, slot.named.parameter);
  return GradientCompressor::make({.compression = options.compression,
                                   .op = options.op,
                                   .predivide_factor = options.gradient_predivide_factor,
                                   .process_set = options.process_set,
                                   .name = formatted("{}/compressed", name)},
                                  std::move(parameters));
}

/// Returns whether buckets follow the order in which gradients come. On the host that of the
/// parameters does: what is reduced early there takes cores that backward needs.
bool deals_as_gradients_come(const std::vector<GradientSlot>& slots,
                             const DistributedOptimizerOptions& options, bool are_taken_together) {
  if (!std::holds_alternative<std::monostate>(options.groups)) return false;
  if (options.process_set.size() == 1 || !options.process_set.included()) return false;
  if (options.shard_optimizer_state || options.share_parameters) return false;
  return are_taken_together || std::any_of(slots.begin(), slots.end(), [](const auto& slot) {
           return !slot.named.parameter.is_cpu();
         });
}

/// Returns the groups of the user's, by the numbers of their slots.
std::vector<std::vector<std::size_t>> lists_of(const std::vector<std::vector<at::Tensor>>& groups,
                                               const std::vector<GradientSlot>& slots) {
  std::unordered_map<const void*, std::size_t> places;
  for (std::size_t i = 0; i < slots.size(); ++i)
    places[slots[i].named.parameter.unsafeGetTensorImpl()] = i;
  std::vector<std::vector<std::size_t>> lists;
  for (const auto& group : groups) {
    auto& list = lists.emplace_back();
    for (const auto& parameter : group) {
      const auto place = places.find(parameter.unsafeGetTensorImpl());
      if (place != places.end()) {
        list.push_back(place->second);
      } else if (detail::gets_gradients(parameter)) {
        throw InvalidArgument("groups: a tensor that is no parameter of the optimizer");
      }
    }
  }
  return lists;
}

/// Returns whether backward will give a gradient, or there is one that must not travel as zeros.
bool is_awaited(const GradientSlot& slot) {
  const at::Tensor& left = slot.gradient();
  return slot.named.parameter.requires_grad() ||
         (left.defined() && (!left.is_cpu() || !slot.is_zero()));
}

}  // namespace

ReducerBuckets::ReducerBuckets(std::vector<NamedParameter> parameters,
                               const DistributedOptimizerOptions& options, std::string name,
                               Taking taking, Context context)
    : options_(options),
      name_(std::move(name)),
      taking_(taking),
      context_(std::move(context)),
      arrivals_(name_, options_.process_set) {
  std::size_t compressed = 0;
  for (auto& named : parameters) {
    GradientSlot& slot = slots_.emplace_back(std::move(named));
    slot.compressed = detail::is_encoded(options_.compression, slot.named.parameter);
    if (slot.compressed) slot.member = compressed++;
  }
  compressed_ = GradientRound(compressed);
  // a convolution takes a block more of each size
  const bool saves_memory = options_.shard_optimizer_state || options_.share_parameters;
  const bool is_alone = options_.process_set.size() == 1;
  memory_terms_ = {.compression = options_.compression,
                   .are_views = options_.gradients_are_views,
                   .may_be_made_there = !saves_memory && !is_alone && taking_ == Taking::ByDevice,
                   .is_alone = is_alone};
  if (deals_as_gradients_come(slots_, options_, taking_ == Taking::Together))
    arrivals_.follow(slots_.size());
  compressor_ = compressor_of(slots_, options_, name_);
  deal();
  const at::NoGradGuard no_gradient;
  make_room();
}

void ReducerBuckets::deal() {
  std::vector<BucketLayout::Member> members;
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  for (const auto& slot : slots_) {
    const at::Tensor& parameter = slot.named.parameter;
    const std::pair kind(parameter.scalar_type(), parameter.device());
    const auto known = std::find(kinds.begin(), kinds.end(), kind);
    const std::size_t element =
        element_bytes(BucketMemory::wire_type(slot.named, options_.compression));
    members.push_back({.name = slot.named.name,
                       .bytes = static_cast<std::size_t>(parameter.numel()) * element,
                       .kind = static_cast<int>(known - kinds.begin()),
                       .alone = slot.compressed});
    if (known == kinds.end()) kinds.push_back(kind);
  }
  const std::size_t most =
      std::min<std::size_t>(engine()->config().fusion_threshold_bytes, kBucketBytes);
  BucketLayout::Terms terms{
      .most_bytes = most,
      .first_bytes = arrivals_.is_followed() ? std::min(most, kFirstBucketBytes) : most,
      .order = arrivals_.order()};
  if (const auto* const count = std::get_if<int>(&options_.groups)) terms.groups = *count;
  if (const auto* const groups =
          std::get_if<std::vector<std::vector<at::Tensor>>>(&options_.groups))
    terms.lists = lists_of(*groups, slots_);
  buckets_.clear();
  for (const auto& places : BucketLayout::deal(members, terms)) {
    std::vector<GradientSlot*> slots;
    for (const auto place : places) {
      slots_[place].bucket = buckets_.size();
      slots.push_back(&slots_[place]);
    }
    // Nothing in the name that ranks may have in another order.
    buckets_.emplace_back(formatted("{}/gradients.{}", name_, buckets_.size()), std::move(slots),
                          memory_terms_);
  }
}

/// Buckets that follow one another on a GPU share a block.
void ReducerBuckets::make_room() {
  if (keeper_ != nullptr) return;
  for (std::size_t begin = 0, end = 0; begin < buckets_.size(); begin = end) {
    const GradientBucket& first = buckets_[begin];
    const at::Device here = first.parameter().device();
    std::vector<BucketMemory*> block;
    for (end = begin; end == begin || (end < buckets_.size() && !here.is_cpu() &&
                                       buckets_[end].parameter().device() == here);
         ++end)
      block.push_back(&buckets_[end].memory);
    const auto lend = [&](DataType type, std::size_t bytes) {
      return engine()->allocate(like(first), type, bytes);
    };
    BucketMemory::make_room(block, taking_ == Taking::Together || !here.is_cpu(), lend);
  }
}

void ReducerBuckets::follow_parameters(Between rounds) {
  bool moved = false, to_other_device = false;
  for (auto& slot : slots_) {
    const at::Tensor& parameter = slot.named.parameter;
    if (slot.kind.is_of(parameter)) continue;
    const bool other_device = slot.kind.device != parameter.device();
    if (slot.compressed && (other_device || parameter.sizes() != at::IntArrayRef(slot.kind.sizes)))
      throw InvalidArgument(
          formatted("parameter '{}' has got another device or shape since its optimizer was "
                    "wrapped, and what {} remembers of its gradients does not fit any more; change "
                    "the model first and wrap the optimizer then",
                    slot.named.name, "its compression"));
    slot.convert();
    moved = true;
    to_other_device = to_other_device || other_device;
  }
  const bool anew =
      (rounds == Between::NewOrder && std::exchange(deal_anew_, false)) || to_other_device;
  if (!moved && !anew) return;
  for (auto& slot : slots_) slot.kind = GradientSlot::Kind(slot.named.parameter);
  for (auto& bucket : buckets_) bucket.memory.give_up();
  if (anew) deal();
  make_room();
}

bool ReducerBuckets::is_under_way(const GradientSlot& slot) const {
  return !slot.compressed && buckets_[slot.bucket].round.is_under_way(slot.member);
}

std::pair<ReducerBuckets::Fate, const GradientSlot*> ReducerBuckets::fate_of_gradients(
    const GradientSlot* just_given) const {
  using Since = detail::GradientMark::Since;
  std::size_t under_way = 0, gone = 0;
  const GradientSlot* changed = nullptr;
  for (const auto& slot : slots_) {
    if (!is_under_way(slot)) continue;
    ++under_way;
    const Since since = slot.since_mark();
    if (since == Since::Same) continue;
    // sparse ones leave later
    if (since == Since::Changed && (slot.sparse_dims || &slot == just_given)) continue;
    if (since != Since::Changed &&
        (!slot.gradient().defined() || &slot == just_given || slot.is_zero()))
      ++gone;
    if (changed == nullptr) changed = &slot;
  }
  if (changed == nullptr) return {Fate::Untouched, nullptr};
  return {gone == under_way ? Fate::ThrownAway : Fate::Changed, changed};
}

bool ReducerBuckets::has_late() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const auto& bucket) { return bucket.round.has_late(); });
}

bool ReducerBuckets::has_gathered() const {
  return is_interrupted_ || std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) {
           return bucket.round.has_given();
         });
}

int ReducerBuckets::summed_ranks() const {
  return options_.op == ReduceOp::Sum ? options_.process_set.size() : 1;
}

std::vector<std::vector<at::Tensor>> ReducerBuckets::parameters() const {
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& bucket : buckets_) {
    auto& parameters = all.emplace_back();
    for (const auto* slot : bucket.slots) parameters.push_back(slot->named.parameter);
  }
  return all;
}

/// Gradients for which backward has given nothing, or not as often as agreed.
void ReducerBuckets::take_rest(GradientBucket& bucket, Round round, bool early) {
  for (auto* const slot : bucket.slots) {
    const std::size_t member = slot->member;
    if (bucket.round.is_given(member) && !context_.history.is_failing()) continue;
    at::Tensor& gradient = slot->gradient();
    // backward may add to them yet
    const bool only_zeros = early && !bucket.round.is_awaited(member) && gradient.defined();
    bucket.round.find(member, gradient.defined() && round != Round::ThrownAway && !only_zeros);
    if (bucket.round.is_present(member)) {
      context_.found(*slot);
      slot->share_out(summed_ranks());
      slot->follow_layout(options_.sparse_as_dense);
      if (!slot->sparse_dims) bucket.memory.take_in(member, false);
      if (!slot->sparse_dims) bucket.memory.pack(member);
      slot->set_mark();
      continue;
    }
    if (bucket.memory.has_gradient(member)) {  // it stays, and its memory travels
      gradient = only_zeros ? at::zeros_like(gradient) : gradient.clone();
      slot->set_mark();
    }
    if (!slot->sparse_dims || !bucket.memory.result(member).defined())
      bucket.memory.fill_with_zeros(member);
  }
}

void ReducerBuckets::give(GradientSlot& slot, bool is_complete) {
  GradientRound& round = round_of(slot);
  if (slot.compressed)
    return is_complete ? round.give(slot.member) : round.find(slot.member, false);
  if (round.is_submitted() && !round.is_given(slot.member))
    return round.come_late(slot.member, !slot.sparse_dims && !slot.gradient().is_sparse());
  GradientBucket& bucket = buckets_[slot.bucket];
  open(bucket);
  arrivals_.note(static_cast<std::size_t>(&slot - slots_.data()));
  bucket.streams.note(slot.named.parameter);
  slot.follow_layout(options_.sparse_as_dense);
  if (!slot.sparse_dims) bucket.memory.take_in(slot.member, true);
  if (!is_complete) return;
  if (!slot.sparse_dims) bucket.memory.pack(slot.member);
  round.give(slot.member);
  if (round.state() == RoundState::Gathering) {
    std::vector<bool> are_awaited;
    for (const auto* member : bucket.slots) are_awaited.push_back(is_awaited(*member));
    round.count(are_awaited);
  }
  // Nobody waits in backward: another rank may wait there for what this one gives later. What is
  // left a later hook submits, or synchronize().
  if (!round.is_complete() || !context_.weights.is_known()) return;
  for (auto& complete : buckets_) {
    if (!complete.round.is_complete()) continue;
    take_rest(complete, Round::Kept, true);
    submit(complete, Round::Kept, false);
  }
  put_away_what_is_done();
  for (auto& done : buckets_)  // memory of the gradients that have been copied is for others
    if (done.round.is_reduced() && done.memory.is_taken_together()) done.memory.let_go_of_given();
}

void ReducerBuckets::forget() {
  for (auto& slot : slots_) {
    slot.passes = 0;
    slot.weighed = GradientSlot::Weighed::No;
  }
  arrivals_.forget();
  compressed_.forget();
  for (auto& bucket : buckets_) {
    bucket.round.forget();
    bucket.streams.clear();
    bucket.memory.let_go_of_given();
  }
  has_begun_ = is_interrupted_ = false;
  context_.weights.end_round();
}

void ReducerBuckets::go_home() {
  for (auto& bucket : buckets_) bucket.memory.go_home();
}

}  // namespace hvd
