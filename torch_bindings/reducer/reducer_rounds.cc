// The rounds of a GradientReducer's buckets: what is submitted, waited for and given back.
// Tested in tests/torch_bindings/reducer/reducer_test.cc,
// tests/torch_bindings/reducer/reducer_sparse_test.cc
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <numeric>
#include <utility>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/platform/device.h"
#include "torch_bindings/reducer/reducer_buckets.h"

namespace hvd {

namespace {

std::byte no_elements;  // where they would be

/// Sets how gradients become their average or sum.
void scale_gradients(AllreduceOptions& terms, const DistributedOptimizerOptions& options) {
  terms.op = options.op;
  if (options.gradient_predivide_factor == 1) return;
  terms.op = ReduceOp::Sum;
  terms.prescale_factor = 1 / options.gradient_predivide_factor;
  terms.postscale_factor = options.gradient_predivide_factor / options.process_set.size();
}

/// Returns an argument without elements, whose shape is compared between the ranks.
TensorArgument announcement(const RoundHistory& history, const at::Tensor& nothing) {
  TensorArgument argument = detail::argument(nothing, nothing, "");
  argument.output = &no_elements;
  argument.shape = history.announced();
  argument.shape.push_back(0);
  argument.name = history.words();
  return argument;
}

/// This rank's part of the result goes where it lies in the gradient: nobody else reads that of it.
void scatter(TensorArgument& argument, std::vector<std::int64_t> parts, int rank) {
  if (argument.shape.empty()) argument.shape = {1};
  const std::int64_t elements = element_count(argument.shape);
  // sparse, or of another shape now
  if (std::accumulate(parts.begin(), parts.end(), std::int64_t{0}) != elements) {
    std::fill(parts.begin(), parts.end(), 0);
    parts.front() = elements;
  }
  const auto before = static_cast<std::size_t>(
      std::accumulate(parts.begin(), parts.begin() + rank, std::int64_t{0}));
  if (argument.output == nullptr) argument.output = &no_elements;
  argument.output =
      static_cast<std::byte*>(argument.output) + before * element_bytes(argument.dtype);
  argument.splits = std::move(parts);
}

/// Collective over the ranks that have got a Mismatch for the bucket: returns the error with what
/// is unusual on each of them.
Mismatch explained(const Mismatch& error, const std::string& bucket, std::string mine,
                   const ProcessSet& process_set) {
  if (!mine.empty()) mine = formatted("; rank {} {}", hvd::rank(), mine);
  const std::string all = detail::said_by_all(mine, bucket + "/differences", process_set);
  if (all.empty()) return error;
  return Mismatch(
      formatted("{} (dimensions of 1 in front of a shape tell rounds apart{})", error.what(), all));
}

}  // namespace

/// The sum of the weights is there, as a rule, before the first bucket is complete.
void ReducerBuckets::begin_round() {
  if (has_begun_) return;
  follow_parameters(Between::NewOrder);
  has_begun_ = true;
  if (!buckets_.empty()) ask_for_weights();
}

void ReducerBuckets::ask_for_weights() {
  if (buckets_.empty()) return context_.weights.ask(name_ + "/weights", false);
  context_.weights.ask(buckets_.front().name, scatters(buckets_.front()));
}

/// Returns the submission of a bucket, without its tensors.
Submission ReducerBuckets::like(const GradientBucket& bucket) const {
  const bool follows_weights = context_.weights.own() && is_first(bucket);
  AllreduceOptions terms{.name = follows_weights ? bucket.name + "/weighed" : bucket.name,
                         .process_set = options_.process_set};
  scale_gradients(terms, options_);
  const OpKind kind = scatters(bucket) ? OpKind::Reducescatter : OpKind::Allreduce;
  Submission submission = request(kind, terms, detail::device_of(bucket.parameter()));
  submission.on_stream = submission.device.kind == DeviceKind::Cuda;
  return submission;
}

void ReducerBuckets::submit(GradientBucket& bucket, Round round, bool wait_follows) {
  const auto running = engine();
  const GradientWeights& weights = context_.weights;
  const bool are_weights_known = context_.weights.learn();
  // Other ranks have sent theirs under the name of the weights: all have failed.
  if (!are_weights_known && is_first(bucket)) return bucket.round.submit(weights.pending());
  bucket.take_in_together(round == Round::ThrownAway);
  if (weights.are_asked() && are_weights_known && round != Round::ThrownAway) bucket.weigh(weights);
  Submission submission = like(bucket);
  std::vector<std::shared_ptr<void>> kept;
  const auto ranks = static_cast<std::uint64_t>(options_.process_set.size());
  const bool scattered = submission.kind == OpKind::Reducescatter;
  for (const auto* slot : bucket.slots) {
    TensorArgument argument = bucket.memory.argument(slot->member, kept);
    if (!slot->sparse_dims)
      bytes_sent_ +=
          (scattered ? 1 : 2) * bucket.memory.result(slot->member).nbytes() * (ranks - 1) / ranks;
    argument.present = bucket.round.is_present(slot->member) && !slot->sparse_dims;
    if (slot->sparse_dims) argument.shape = {0};  // says so to the others
    if (scattered)
      scatter(argument, keeper_->parts(slot->named.parameter), options_.process_set.rank());
    submission.tensors.push_back(std::move(argument));
  }
  if (is_first(bucket) && !context_.history.announced().empty()) {
    const auto nothing =
        std::make_shared<at::Tensor>(at::empty({0}, bucket.memory.result(0).options()));
    submission.tensors.push_back(announcement(context_.history, *nothing));
    kept.push_back(nothing);
    context_.history.submit_announcement();
  }
  Shape& tells_the_round = submission.tensors.front().shape;
  tells_the_round.insert(tells_the_round.begin(), context_.history.kind(), 1);
  if (auto point = detail::stream_point(bucket.memory.result(0), bucket.name)) {
    for (auto& argument : submission.tensors) argument.ready_event = point->event();
    kept.push_back(std::move(point));
  }
  submission.keep_alive = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept));
  bucket.round.submit(
      running->submit(std::move(submission), wait_follows ? After::Wait : After::Return));
}

void ReducerBuckets::wait_for(GradientBucket& bucket, Round round) {
  const auto running = engine();
  for (bool again = false;; again = true) {
    try {
      running->wait(*bucket.round.pending());
      break;
    } catch (const Deadlock&) {  // the others are somewhere else, and answer no question
      bucket.put_given_back();
      throw;
    } catch (const Mismatch& error) {
      bucket.put_given_back();
      // The ranks may differ just in who knows that a gradient is sparse. Then all know, and retry.
      if (again || options_.sparse_as_dense || !bucket.learn_sparse(options_.process_set))
        throw explained(error, bucket.name,
                        context_.history.peculiarities(context_.weights.own().has_value()),
                        options_.process_set);
      if (context_.weights.are_asked() && bucket.round.pending() == context_.weights.pending())
        ask_for_weights();
      submit(bucket, round, true);
    }
  }
  if (is_first(bucket)) context_.history.end_announcement();
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (bucket.round.pending()->present_anywhere[i]) bucket.memory.note_result(i);
}

void ReducerBuckets::complete(GradientBucket& bucket, Round round) {
  if (bucket.round.state() != RoundState::PutAway) wait_for(bucket, round);
  detail::wait_on_current_stream(bucket.parameter(), bucket.round.pending()->completions,
                                 bucket.name);
  bucket.memory.let_go_of_given();
  if (keeper_ != nullptr) return put_away(bucket, round, false);
  if (round != Round::ThrownAway) bucket.give_back(1.0 / summed_ranks());
}

/// Throws what the first failed bucket threw, when all are over.
void ReducerBuckets::reduce(Round round) {
  begin_round();
  context_.replicas.begin_round();
  for (auto& bucket : buckets_) {
    if (bucket.round.is_submitted()) continue;
    open(bucket);
    take_rest(bucket, round, false);
    submit(bucket, round, true);
  }
  if (keeper_ == nullptr) arrivals_.submit(round == Round::Kept);
  detail::FirstFailure failure;
  // The first bucket comes before what is compressed: ranks that are not in the same kind of round
  // all hear of it there, and stop alike.
  if (!buckets_.empty()) failure.attempt([&] { complete(buckets_.front(), round); });
  try {
    context_.replicas.end_round();
  } catch (const detail::OtherTensors&) {  // says why gradients do not fit, and which is whose
    failure.replace();
  } catch (
      ...) {  // ranks that are not in the same kind of round have said above why replicas differ
    failure.note();
  }
  if (!failure && compressor_ && round == Round::Kept)
    failure.attempt([this] { reduce_compressed(); });
  if (!failure && compressor_ && context_.history.is_failing())
    failure.attempt([this] { compressor_->compare(Shape{0, 0, 0}); });
  for (std::size_t i = 1; i < buckets_.size(); ++i)
    failure.attempt([&] { complete(buckets_[i], round); });
  if (!failure) failure.attempt([&] { reduce_sparse(round); });
  if (!failure) failure.attempt([&] { deal_anew_ = arrivals_.learn() || deal_anew_; });
  if (!failure) failure.attempt(context_.ended);
  if (!failure) return;
  for (auto& bucket : buckets_) {
    bucket.put_given_back();
    bucket.put_back_weighed(context_.weights.factor());
  }
  drop_shares();
  for (auto& slot : slots_) slot.reduced = false;
  forget();
  context_.history.begin_step();
  failure.rethrow();
}

void ReducerBuckets::reduce_compressed() {
  for (auto& slot : slots_)
    if (slot.compressed) slot.share_out(summed_ranks());
  GradientWeights& weights = context_.weights;
  Shape compared = buckets_.empty() ? context_.history.announced() : Shape{};
  // no layout: tells ranks that have none
  if (buckets_.empty() && weights.own()) compared.insert(compared.begin(), {0, 0});
  compressor_->reduce(compared, [this, &weights] {
    if (!weights.are_asked()) ask_for_weights();
    weights.learn();
    return weights.are_asked() ? weights.factor() : 1;
  });
  if (buckets_.empty()) context_.history.drop_announcement();
}

/// Reduces sparse gradients, each on its own, as indices and values.
void ReducerBuckets::reduce_sparse(Round round) {
  std::vector<std::pair<GradientSlot*, Handle<at::Tensor>>> under_way;
  for (auto& slot : slots_) {
    if (!slot.sparse_dims) continue;
    if (round != Round::ThrownAway) slot.share_out(summed_ranks());
    const at::Tensor& parameter = slot.named.parameter;
    const at::Tensor& gradient = parameter.grad();
    at::Tensor mine = gradient.defined()
                          ? gradient
                          : at::zeros_like(parameter, parameter.options().requires_grad(false));
    if (!mine.is_sparse()) mine = mine.to_sparse(slot.sparse_dims);
    if (context_.weights.are_asked()) mine = context_.weights.weighed(mine);
    AllreduceOptions options{.name = formatted("{}/sparse gradient of {}", name_, slot.named.name),
                             .process_set = options_.process_set};
    if (!options_.compression.needs_memory()) options.compression = options_.compression;
    scale_gradients(options, options_);
    if (context_.history.is_failing()) options.prescale_factor = 0;  // fits no other round
    under_way.emplace_back(&slot, sparse_allreduce_async(mine, options));
  }
  for (auto& [slot, handle] : under_way) {
    const at::Tensor sum = handle.wait();
    if (round == Round::ThrownAway) continue;
    at::Tensor& gradient = slot->gradient();
    if (gradient.defined() || sum._nnz() > 0) gradient = sum;
  }
}

void ReducerBuckets::compare() {
  RoundHistory& history = context_.history;
  if (buckets_.empty()) {
    context_.replicas.begin_round();  // as in any round
    context_.replicas.end_round();
    if (compressor_) compressor_->compare(history.announced());
    return history.drop_announcement();
  }
  history.end_round();  // it is none that a rank could take for its next one
  try {
    reduce(Round::ThrownAway);
  } catch (...) {
    history.drop_announcement();
    throw;
  }
  history.undo_round();
  forget();
}

void ReducerBuckets::throw_away(bool joined) {
  joined ? let_finish() : reduce(Round::ThrownAway);
  drop_shares();
  forget();
  for (auto& slot : slots_) slot.reduced = false;
  if (!joined) context_.history.end_round();
}

void ReducerBuckets::let_finish() {
  for (const auto& bucket : buckets_) {
    if (!bucket.round.is_submitted() || bucket.round.state() == RoundState::PutAway) continue;
    try {
      engine()->wait(*bucket.round.pending());
      detail::wait_on_current_stream(bucket.parameter(), bucket.round.pending()->completions,
                                     bucket.name);
    } catch (const std::exception&) {  // it is over, too
    }
  }
}

}  // namespace hvd
