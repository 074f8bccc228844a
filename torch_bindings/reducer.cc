// The rounds of a GradientReducer: what is submitted, waited for, given back and forgotten.
#include "torch_bindings/reducer.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/agreement.h"
#include "torch_bindings/device.h"
#include "torch_bindings/join_rounds.h"
#include "torch_bindings/tensors.h"

namespace hvd {

namespace {

/// Here, where nothing is under way yet, and not in the middle of a backward pass.
void refuse_other_gpu(const GradientReducer::Named& named) {
  const int device = engine()->device();
  if (!named.parameter.is_cuda() || device < 0 || size() == 1 || named.parameter.get_device() == device) return;
  throw InvalidArgument(formatted(
      "parameter '{}' is on {}, and the GPU of rank {} is cuda:{} (hvd::local_device()); move the model there before it is wrapped",
      named.name, named.parameter.device().str(), rank(), device));
}

}  // namespace

GradientReducer::GradientReducer(std::vector<Named> parameters, DistributedOptimizerOptions options, int number, const std::string& kind,
                                 Taking taking, const std::string& part)
    : options_(std::move(options)),
      taking_(taking),
      owner_(options_.process_set, kind),
      name_(formatted("{}.{}{}", kind, number, part)),
      passes_per_step_(options_.backward_passes_per_step),
      replicas_(name_, options_.process_set),
      history_(name_),
      arrivals_(name_, options_.process_set),
      weights_(options_.process_set) {
  std::size_t compressed = 0;
  for (auto& named : parameters) {
    refuse_other_gpu(named);
    Slot& slot = slots_.emplace_back(std::move(named));
    slot.compressed = GradientCompressor::takes(options_.compression, slot.named.parameter);
    if (slot.compressed) slot.member = compressed++;
    owner_.add(slot.named.parameter);
  }
  compressed_ = GradientRound(compressed);
  replicas_.watch(this->parameters());
  const bool saves_memory = options_.shard_optimizer_state || options_.share_parameters;  // a convolution takes a block more of each size
  const bool is_alone = options_.process_set.size() == 1;
  memory_terms_ = {.compression = options_.compression,
                   .are_views = options_.gradients_are_views,
                   .may_be_made_there = !saves_memory && !is_alone && taking_ == Taking::ByDevice,
                   .is_alone = is_alone};
  if (deals_as_gradients_come()) arrivals_.follow(slots_.size());
  make_compressor();
  deal();
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

void GradientReducer::scale(AllreduceOptions& terms) const {
  terms.op = options_.op;
  if (options_.gradient_predivide_factor == 1) return;
  terms.op = ReduceOp::Sum;
  terms.prescale_factor = 1 / options_.gradient_predivide_factor;
  terms.postscale_factor = options_.gradient_predivide_factor / options_.process_set.size();
}

/// On the host the order of the parameters does: what is reduced early there takes cores that backward needs.
bool GradientReducer::deals_as_gradients_come() const {
  if (!std::holds_alternative<std::monostate>(options_.groups)) return false;
  if (options_.process_set.size() == 1 || !options_.process_set.included()) return false;
  if (options_.shard_optimizer_state || options_.share_parameters) return false;
  const auto wanted = [this](const Slot& slot) { return taking_ == Taking::Together || !slot.named.parameter.is_cpu(); };
  return std::any_of(slots_.begin(), slots_.end(), wanted);
}

/// How the bucket is submitted, without its tensors.
Submission GradientReducer::like(const Bucket& bucket) const {
  const bool follows_weights = weights_.own() && &bucket == &buckets_.front();
  AllreduceOptions terms{.name = follows_weights ? bucket.name + "/weighed" : bucket.name, .process_set = options_.process_set};
  scale(terms);
  const OpKind kind = scatters(bucket) ? OpKind::Reducescatter : OpKind::Allreduce;
  Submission submission = request(kind, terms, detail::device_of(slots_[bucket.slots.front()].named.parameter));
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  return submission;
}

void GradientReducer::submit(Bucket& bucket, Round round, bool wait_follows) {
  const auto running = engine();
  const bool are_weights_known = weights_.learn();
  if (!are_weights_known && &bucket == &buckets_.front()) {  // other ranks have sent theirs under the name of the weights: all have failed
    bucket.round.submit(weights_.pending());
    return;
  }
  const bool other_streams = bucket.streams.join(slots_[bucket.slots.front()].named.parameter.device());
  if (bucket.memory.is_taken_together()) take_in_together(bucket, round, other_streams);
  if (weights_.are_asked() && are_weights_known && round != Round::ThrownAway) weigh(bucket);
  static std::byte nowhere;  // of what has no elements
  Submission submission = like(bucket);
  std::vector<std::shared_ptr<void>> kept;
  const auto ranks = static_cast<std::uint64_t>(options_.process_set.size());
  const bool scattered = submission.kind == OpKind::Reducescatter;
  for (const auto index : bucket.slots) {
    Slot& slot = slots_[index];
    TensorArgument argument = bucket.memory.argument(slot.member, kept);
    if (!slot.sparse) bytes_sent_ += (scattered ? 1 : 2) * bucket.memory.result(slot.member).nbytes() * (ranks - 1) / ranks;
    argument.present = bucket.round.is_present(slot.member) && !slot.sparse;
    if (slot.sparse) argument.shape = {0};  // says so to the others
    if (scattered) scatter(slot, argument);
    submission.tensors.push_back(std::move(argument));
  }
  if (&bucket == &buckets_.front() && !history_.announced().empty()) {
    const auto nothing = std::make_shared<at::Tensor>(at::empty({0}, bucket.memory.result(0).options()));
    TensorArgument argument = detail::argument(*nothing, *nothing, "");
    argument.output = &nowhere;
    argument.shape = history_.announced();
    argument.shape.push_back(0);
    argument.name = history_.words();
    submission.tensors.push_back(std::move(argument));
    kept.push_back(nothing);
    history_.submit_announcement();
  }
  Shape& tells_the_round = submission.tensors.front().shape;
  tells_the_round.insert(tells_the_round.begin(), history_.kind(), 1);
  if (auto point = detail::stream_point(bucket.memory.result(0), bucket.name)) {
    for (auto& argument : submission.tensors) argument.ready_event = point->event();
    kept.push_back(std::move(point));
  }
  submission.keep_alive = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept));
  bucket.round.submit(running->submit(std::move(submission), wait_follows ? After::Wait : After::Return));
}

struct GradientReducer::Outcome {
  bool reduced = false;  ///< false if there was nothing to reduce
  const Slot* changed = nullptr;
  bool replaced = false;  ///< by a gradient in other memory
};

void GradientReducer::synchronize() {
  const auto [reduced, changed, replaced] = synchronize_gradients();
  if (reduced && join_) end_join_round();  // before anything is refused here: the other ranks are in it
  if (changed == nullptr) return;
  if (replaced && detail::GradientOwners::count(changed->named.parameter) > 1)
    throw InvalidArgument(
        formatted("gradient of '{}': the parameter is in two DistributedOptimizers, and both have reduced what one backward pass gave it; "
                  "leave it to one of them, or make one optimizer with a parameter group for each part of the model",
                  changed->named.name));
  throw InvalidArgument(
      formatted("gradient of '{}': it was changed after backward() while its reduction was under way, so what all ranks got is not "
                "their average or sum; call synchronize() before clipping or changing gradients (hvd::clip_grad_norm_ does), and the "
                "optimizer's zero_grad() to throw them away",
                changed->named.name));
}

void GradientReducer::set_join(std::shared_ptr<detail::JoinRounds> join) {
  join_ = std::move(join);
  join_factor_ = 1;
}

void GradientReducer::end_join_round() {
  const double factor = join_->end_round();
  join_factor_ = options_.op == ReduceOp::Average && !weights_.own() ? factor : 1;  // weights say already what each rank counts
  if (join_factor_ == 1) return;
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

GradientReducer::Outcome GradientReducer::synchronize_gradients() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  if (synchronized_ && !given_anew()) return {};
  refuse_replaced();
  const auto [fate, changed] = fate_of_gradients();
  const bool replaced = changed != nullptr && changed->mark.since(changed->named.parameter.grad()) == detail::GradientMark::Since::Replaced;
  const bool alone = options_.process_set.size() == 1;
  if (alone) keep_changes();
  if (fate == Fate::ThrownAway && !alone) throw_away();
  reduce_until_none_is_late();
  if (fate != Fate::Changed || alone) return {.reduced = true};
  synchronized_ = false;
  history_.refuse(changed->named.name);
  return {.reduced = true, .changed = changed, .replaced = replaced};
}

void GradientReducer::finish_pass() {
  {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_gradient;
    history_.begin_anew();
    try {
      reduce_until_none_is_late();
    } catch (...) {
      history_.begin_anew();
      weights_.set({});
      history_.drop_announcement();
      throw;
    }
    history_.begin_anew();
  }
  if (join_) end_join_round();
  weights_.set({});
  replicas_.note_step();
}

void GradientReducer::reduce_until_none_is_late() {
  for (bool again = true; again;) {
    again = std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.round.has_late(); });
    synchronized_ = false;
    reduce(Round::Kept);
    finish(Round::Kept);
    history_.end_round();
  }
  synchronized_ = true;
  follow_parameters(Between::SameBuckets);
}

void GradientReducer::submit_all(Round round) {
  for (auto& bucket : buckets_) {
    if (bucket.round.is_submitted()) continue;
    open(bucket);
    take_rest(bucket, round, false);
    submit(bucket, round, true);
  }
}

/// One round. Throws what the first failed bucket threw, when all are over.
void GradientReducer::reduce(Round round) {
  begin_round();
  replicas_.begin_round();
  submit_all(round);
  if (keeper_ == nullptr) arrivals_.submit(round == Round::Kept);
  std::exception_ptr first;
  const auto attempt = [&first](const auto& call) {
    try {
      call();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  // The first bucket comes before what is compressed: ranks that are not in the same kind of round all hear of it there, and stop alike.
  if (!buckets_.empty()) attempt([&] { complete(buckets_.front(), round); });
  try {
    replicas_.end_round();
  } catch (const detail::OtherTensors&) {  // says why gradients do not fit, and which is whose
    first = std::current_exception();
  } catch (...) {  // ranks that are not in the same kind of round have said above why replicas differ
    if (!first) first = std::current_exception();
  }
  if (!first && compressor_ && round == Round::Kept) attempt([this] { reduce_compressed(); });
  for (std::size_t i = 1; i < buckets_.size(); ++i) attempt([&] { complete(buckets_[i], round); });
  if (!first) attempt([&] { reduce_sparse(round); });
  if (!first) attempt([&] { deal_anew_ = arrivals_.learn() || deal_anew_; });
  if (!first) return;
  for (auto& bucket : buckets_) put_given_back(bucket);
  put_back_weighed();
  drop_shares();
  for (auto& slot : slots_) slot.reduced = false;
  forget();
  history_.begin_step();
  std::rethrow_exception(first);
}

void GradientReducer::reduce_compressed() {
  for (auto& slot : slots_)
    if (slot.compressed) share_out(slot);
  Shape compared = buckets_.empty() ? history_.announced() : Shape{};
  if (buckets_.empty() && weights_.own()) compared.insert(compared.begin(), {0, 0});  // no layout: tells ranks that have none
  compressor_->reduce(compared, [this] {
    if (!weights_.are_asked()) ask_for_weights();
    weights_.learn();
    return weights_.are_asked() ? weights_.factor() : 1;
  });
  if (buckets_.empty()) history_.drop_announcement();
}

void GradientReducer::complete(Bucket& bucket, Round round) {
  if (bucket.round.state() != RoundState::PutAway) wait_for(bucket, round);
  detail::wait_on_current_stream(slots_[bucket.slots.front()].named.parameter, bucket.round.pending()->completions, bucket.name);
  bucket.memory.let_go_of_given();
  if (keeper_ != nullptr) return put_away(bucket, round, false);
  if (round != Round::ThrownAway) give_back(bucket);
}

/// After a round that went well: what it gave is not to be summed again.
void GradientReducer::finish(Round round) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const at::Tensor& gradient = slot.named.parameter.grad();
    slot.reduced = gradient.defined() && !round_of(slot).is_late(slot.member) && (round == Round::Kept || !slot.compressed);
    slot.mark.set(gradient);
    if (!sums() || !slot.reduced || slot.before_hook || !hooked_ || !slot.named.parameter.requires_grad()) continue;
    slot.before_hook = slot.named.parameter.register_hook([weak = weak_from_this(), i](const at::Tensor& /*given*/) {
      if (const auto self = weak.lock()) self->before_gradient(i);
    });
  }
  shares_kept_ = keeper_ != nullptr;
  forget();
}

void GradientReducer::forget() {
  for (auto& slot : slots_) {
    slot.passes = 0;
    slot.weighed = Weighed::No;
  }
  arrivals_.forget();
  compressed_.forget();
  for (auto& bucket : buckets_) {
    bucket.round.forget();
    bucket.streams.clear();
    bucket.memory.let_go_of_given();
  }
  round_begun_ = interrupted_ = false;
  weights_.end_round();
}

bool GradientReducer::is_synchronized() const {
  const std::lock_guard lock(mutex_);
  return synchronized_;
}

void GradientReducer::settle() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_gradient;
  // Other ranks may have submitted buckets that this one has not, and wait for them in their own zero_grad: all take part in all.
  const bool gathered = std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.round.has_given(); });
  if (gathered || interrupted_) {
    reduce(Round::KeptButCompressed);
    history_.end_round();
  }
  history_.throw_away();
  forget();
  for (auto& slot : slots_) slot.reduced = false;
  for (auto& bucket : buckets_) bucket.memory.go_home();  // what a gradient was made in may go with `.grad`
  synchronized_ = shares_kept_ = false;
}

void GradientReducer::begin_step() {
  const std::lock_guard lock(mutex_);
  forget();
  synchronized_ = shares_kept_ = false;
  history_.begin_step();
  weights_.end_step();
  replicas_.note_step();
}

void GradientReducer::watch(ReplicaComparer::Terms terms) {
  const std::lock_guard lock(mutex_);
  replicas_.watch(std::move(terms));
}

void GradientReducer::check_replicas() {
  const std::lock_guard lock(mutex_);
  replicas_.check();
}

void GradientReducer::begin_evaluation() {
  const std::lock_guard lock(mutex_);
  synchronized_ = false;
  history_.begin_anew();
}

void GradientReducer::set_passes(int passes) {
  const std::lock_guard lock(mutex_);
  passes_per_step_ = passes;
}

at::Tensor GradientReducer::reduce_loss(const at::Tensor& loss, const std::string& refusal) const {
  const AllreduceOptions options{.name = formatted("{}/loss", name_), .op = options_.op, .process_set = options_.process_set};
  const at::Tensor own = weights_.own() ? weights_.weighed(loss.detach()) : loss.detach();
  const at::Tensor all = detail::allreduce_unless_refused(own, options, refusal);
  return join_factor_ == 1 ? all : all * join_factor_;
}

}  // namespace hvd
