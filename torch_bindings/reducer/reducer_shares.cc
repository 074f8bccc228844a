// Buckets of which each rank keeps its share of the gradients alone: a bucket has memory from its
// first gradient on until it is reduced, and `.grad` ends with it.
// Tested in tests/torch_bindings/sharding/shard_gradients_test.cc
#include <torch/torch.h>

#include <algorithm>
#include <functional>

#include "torch_bindings/reducer/reducer_buckets.h"

namespace hvd {

namespace {

/// Stands in `.grad` for a gradient that is reduced already, while other buckets are still to come.
at::Tensor stand_in(const at::Tensor& parameter) {
  return at::zeros({}, parameter.options().requires_grad(false)).expand(parameter.sizes());
}

}  // namespace

void ReducerBuckets::keep_shares(GradientKeeper* keeper) {
  keeper_ = keeper;
  memory_terms_.go_in_parts = keeper != nullptr;
  if (keeper_ == nullptr) return make_room();
  for (auto& bucket : buckets_) bucket.memory.give_up();
}

/// Returns whether the bucket goes as a reducescatter, in which each rank is sent its part alone.
/// NCCL makes all parts as long as the longest: where whole parameters are kept, so that one rank
/// may have all of a bucket, an allreduce on a GPU sends less.
bool ReducerBuckets::scatters(const GradientBucket& bucket) const {
  if (keeper_ == nullptr) return false;
  if (bucket.parameter().is_cpu()) return true;
  std::vector<std::int64_t> parts(static_cast<std::size_t>(options_.process_set.size()), 0);
  std::int64_t all = 0;
  for (const auto* slot : bucket.slots) {
    const auto& of_one = keeper_->parts(slot->named.parameter);
    std::transform(of_one.begin(), of_one.end(), parts.begin(), parts.begin(), std::plus<>());
    all += slot->named.parameter.numel();
  }
  return *std::max_element(parts.begin(), parts.end()) * static_cast<std::int64_t>(parts.size()) <=
         2 * all;
}

/// Makes room for the bucket before a gradient of it is taken in. On a GPU gradients stay where
/// autograd has made them.
void ReducerBuckets::open(GradientBucket& bucket) {
  if (keeper_ == nullptr || bucket.memory.has_room() || !bucket.parameter().is_cpu()) return;
  BucketMemory::make_room({&bucket.memory}, false, nullptr);
}

/// Gives what the bucket's round has given to who keeps it. `early`: other buckets are still to
/// come, and what stands in `.grad` shows what a user makes of it.
void ReducerBuckets::put_away(GradientBucket& bucket, Round round, bool early) {
  const bool is_kept_already = bucket.round.state() == RoundState::PutAway;
  for (auto* const slot : bucket.slots) {
    const std::size_t member = slot->member;
    if (!is_kept_already && round != Round::ThrownAway &&
        bucket.round.pending()->present_anywhere[member])
      keeper_->keep(slot->named.parameter, bucket.memory.result(member));
    // it is what has come since
    if (bucket.round.is_late(member) || round == Round::ThrownAway) continue;
    slot->gradient() =
        early && bucket.round.is_present(member) ? stand_in(slot->named.parameter) : at::Tensor();
    slot->set_mark();
  }
  bucket.memory.give_up();
  bucket.round.put_away();
}

/// While backward runs: reduced buckets do not keep their memory until the others are.
void ReducerBuckets::put_away_what_is_done() {
  if (keeper_ == nullptr) return;
  for (auto& bucket : buckets_) {
    if (bucket.round.state() == RoundState::PutAway || !bucket.memory.has_room() ||
        !bucket.round.is_reduced())
      continue;
    wait_for(bucket, Round::Kept);
    put_away(bucket, Round::Kept, true);
  }
}

/// Drops the shares of a round that was thrown away or has failed: what some of its buckets gave
/// counts no more than what the others did.
void ReducerBuckets::drop_shares() {
  if (keeper_ == nullptr) return;
  for (auto& slot : slots_) {
    keeper_->drop(slot.named.parameter);
    const bool stands_in =
        round_of(slot).state() == RoundState::PutAway && round_of(slot).is_present(slot.member);
    if (stands_in && slot.since_mark() == detail::GradientMark::Since::Same)
      slot.gradient().reset();
  }
}

}  // namespace hvd
