#include "torch_bindings/reducer.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
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

class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(const GradientReducer* owner, std::function<void()> call) : owner_(owner), call_(std::move(call)) {}
  void operator()(const at::Tensor& /*parameter*/) override { call_(); }
  [[nodiscard]] bool is_of(const GradientReducer* reducer) const { return owner_ == reducer; }

 private:
  const GradientReducer* owner_;
  std::function<void()> call_;
};

}  // namespace

GradientReducer::GradientReducer(std::vector<Named> parameters, DistributedOptimizerOptions options, int number, const std::string& kind,
                                 Taking taking, const std::string& part)
    : options_(std::move(options)),
      kind_(kind),
      name_(formatted("{}.{}{}", kind, number, part)),
      passes_per_step_(options_.backward_passes_per_step) {
  for (auto& named : parameters) {
    Slot slot;
    slot.named = std::move(named);
    slot.compressed = GradientCompressor::takes(options_.compression, slot.named.parameter);
    reduced_on_.add(slot.named.parameter);
    slots_.push_back(std::move(slot));
  }
  make_compressor();
  deal(options_);
  const at::NoGradGuard no_gradient;
  make_room(taking);
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
void GradientReducer::make_room(Taking taking) {
  const auto device = [this](const Bucket& bucket) { return slots_[bucket.slots.front()].named.parameter.device(); };
  for (std::size_t begin = 0, end = 0; begin < buckets_.size(); begin = end) {
    const at::Device here = device(buckets_[begin]);
    for (end = begin + 1; end < buckets_.size() && !here.is_cpu() && device(buckets_[end]) == here;) ++end;
    make_room(std::span(buckets_).subspan(begin, end - begin));
  }
  for (auto& bucket : buckets_) bucket.together = bucket.memory && (taking == Taking::Together || !device(bucket).is_cpu());
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
    slot->wire = detail::view_of(memory, offset, slot->named.parameter, detail::scalar_type_of(wire_type(*slot)));
    if (!travels_compressed(*slot)) slot->home = slot->wire;
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
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto call = [weak = weak_from_this(), i] {
      if (const auto self = weak.lock()) self->on_gradient(i);
    };
    torch::autograd::impl::set_post_acc_grad_hooks(slots_[i].named.parameter, std::make_unique<Hook>(this, std::move(call)));
  }
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
  for (const auto& slot : slots_) {
    // Another optimizer may have been put around the same parameters since.
    const auto* const hook = dynamic_cast<const Hook*>(torch::autograd::impl::post_acc_grad_hooks(slot.named.parameter).get());
    if (hook != nullptr && hook->is_of(this)) torch::autograd::impl::set_post_acc_grad_hooks(slot.named.parameter, nullptr);
  }
}

void GradientReducer::on_gradient(std::size_t index) {
  const bool wanted = !wanted_ || wanted_();
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!wanted) {
    if (!slot.ready) return;
    throw InvalidArgument(
        formatted("gradient of '{}': another backward pass within the one that is being reduced (a checkpointed part, say) has added to "
                  "it after it had left; use the parameter in one of them only, or make the pass under no_sync()",
                  slot.named.name));
  }
  if (!slot.named.parameter.grad().defined()) return;
  if (slot.passes >= passes_per_step_)
    throw InvalidArgument(
        formatted("gradient of '{}': more than {} backward passes without step(); raise backward_passes_per_step or call "
                  "step(), synchronize() or zero_grad() in between",
                  slot.named.name, passes_per_step_));
  synchronized_ = false;
  ++slot.passes;
  if (slot.compressed) {
    slot.ready = slot.passes == passes_per_step_;
    return;
  }
  const at::NoGradGuard no_gradient;
  take_in(slot);
  if (slot.passes < passes_per_step_) return;
  pack(slot);
  slot.ready = slot.present = true;
  Bucket& bucket = buckets_[slot.bucket];
  if (++bucket.ready == bucket.slots.size()) submit(bucket, false);
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
  if (slot.home.defined() || slot.sparse || buckets_[slot.bucket].together) return;
  at::Tensor& gradient = slot.named.parameter.mutable_grad();
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
  if (auto event = detail::ready_event(slots_[bucket.slots.front()].wire)) {
    for (auto& argument : submission.tensors) argument.ready_event = event.get();
    kept.push_back(std::move(event));
  }
  submission.keep_alive = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept));
  bucket.pending = running->submit(std::move(submission), wait_follows ? After::Wait : After::Return);
  bucket.submitted = true;
}

void GradientReducer::synchronize() {
  reduce(true);
  if (join_) end_join_round();
}

void GradientReducer::set_join(std::shared_ptr<detail::JoinRounds> join) { join_ = std::move(join); }

void GradientReducer::end_join_round() {
  const double factor = join_->end_round();
  if (factor == 1 || options_.op != ReduceOp::Average) return;
  const at::NoGradGuard no_gradient;
  for (auto& slot : slots_)
    if (at::Tensor& gradient = slot.named.parameter.mutable_grad(); gradient.defined()) gradient.mul_(factor);
}

std::vector<std::pair<std::string, at::Tensor>> GradientReducer::parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& slot : slots_) all.emplace_back(slot.named.name, slot.named.parameter);
  return all;
}

void GradientReducer::reduce(bool also_compressed) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  const auto running = engine();
  for (auto& bucket : buckets_) {
    if (bucket.submitted) continue;
    for (const auto index : bucket.slots) {
      Slot& slot = slots_[index];
      if (slot.ready) continue;
      slot.present = slot.named.parameter.grad().defined();
      if (slot.present) {
        take_in(slot);
        pack(slot);
      } else if (slot.sparse && slot.wire.defined()) {
        continue;
      } else if (bucket.memory) {
        slot.wire.zero_();
      } else {
        slot.wire = at::zeros_like(slot.named.parameter,
                                   slot.named.parameter.options().requires_grad(false).dtype(detail::scalar_type_of(wire_type(slot))));
      }
    }
    submit(bucket, true);
  }
  std::exception_ptr first;
  try {
    if (compressor_ && also_compressed) compressor_->reduce();
  } catch (...) {
    first = std::current_exception();
  }
  for (auto& bucket : buckets_) {
    try {
      wait_for(bucket);
      give_back(bucket);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  try {
    if (!first) reduce_sparse();
  } catch (...) {
    first = std::current_exception();
  }
  forget();
  synchronized_ = !first;
  if (first) std::rethrow_exception(first);
}

void GradientReducer::wait_for(Bucket& bucket) {
  const auto running = engine();
  try {
    running->wait(*bucket.pending);
  } catch (const Mismatch&) {
    // The ranks may differ just in who knows that a gradient is sparse. Then all know now, and try again.
    if (options_.sparse_as_dense || !learn_sparse(bucket)) throw;
    submit(bucket, true);
    running->wait(*bucket.pending);
  }
  if (&bucket == &buckets_.front() && std::exchange(announcing_, false)) announced_.clear();
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

void GradientReducer::reduce_sparse() {
  std::vector<std::pair<Slot*, Handle<at::Tensor>>> under_way;
  for (auto& slot : slots_) {
    if (!slot.sparse) continue;
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
    at::Tensor& gradient = slot->named.parameter.mutable_grad();
    if (gradient.defined() || sum._nnz() > 0) gradient = sum;
  }
}

void GradientReducer::give_back(Bucket& bucket) {
  detail::wait_on_current_stream(slots_[bucket.slots.front()].named.parameter, bucket.pending->completions);
  std::vector<at::Tensor> from, to;
  for (std::size_t i = 0; i < bucket.slots.size(); ++i) {
    Slot& slot = slots_[bucket.slots[i]];
    if (!bucket.pending->present_anywhere[i]) continue;
    at::Tensor& gradient = slot.named.parameter.mutable_grad();
    if (slot.home.defined()) {
      if (!gradient.defined() || !gradient.is_alias_of(slot.home)) gradient = slot.home;
      continue;
    }
    if (gradient.defined() && gradient.is_alias_of(slot.wire)) continue;
    if (!gradient.defined()) gradient = at::empty_like(slot.named.parameter, slot.named.parameter.options().requires_grad(false));
    from.push_back(slot.wire);
    to.push_back(gradient);
  }
  copy_together(to, from);
}

void GradientReducer::forget() {
  for (auto& slot : slots_) {
    slot.passes = 0;
    slot.ready = slot.present = false;
  }
  for (auto& bucket : buckets_) {
    bucket.ready = 0;
    bucket.submitted = false;
    bucket.pending.reset();
  }
}

bool GradientReducer::is_synchronized() const {
  const std::lock_guard lock(mutex_);
  return synchronized_;
}

void GradientReducer::settle() {
  bool gathered = false;
  {
    const std::lock_guard lock(mutex_);
    gathered = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.ready && !slot.compressed; });
  }
  // Other ranks may have submitted buckets that this one has not, and wait for them in their own zero_grad: all take part in all.
  if (gathered) reduce(false);
  const std::lock_guard lock(mutex_);
  forget();
  synchronized_ = false;
}

void GradientReducer::begin_step() {
  const std::lock_guard lock(mutex_);
  forget();
  synchronized_ = false;
}

void GradientReducer::set_passes(int passes) {
  const std::lock_guard lock(mutex_);
  passes_per_step_ = passes;
}

at::Tensor GradientReducer::reduce_loss(const at::Tensor& loss) const {
  return allreduce(loss.detach(), {.name = formatted("{}/loss", name_), .op = options_.op, .process_set = options_.process_set});
}

}  // namespace hvd
