#pragma once
/// The buckets of a GradientReducer, and how they get through a round together. Parameters are
/// dealt to buckets in the order in which backward gives their gradients; a bucket is one
/// submission, made when its last gradient is there, or when the round is reduced.
///
/// On a GPU, where the user has made no groups, buckets are dealt as PyTorch's DDP deals them: the
/// first is small, so that something travels early, and after the first round all are dealt anew,
/// in the order in which backward gave the gradients on the set's first rank.
///
/// A round in which gradients have weights begins with their sum, under the name that the first
/// bucket has in any other round: so ranks that have none meet it there, as a Mismatch. Thread: the
/// reducer's, under its lock (but for `slots` and `parameters`), without recording of gradients.
/// Errors: of the first bucket that failed, when all that were submitted are over.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/submission.h"
#include "torch_bindings/gradients/compressor.h"
#include "torch_bindings/gradients/gradient_arrivals.h"
#include "torch_bindings/gradients/gradient_bucket.h"
#include "torch_bindings/gradients/gradient_weights.h"
#include "torch_bindings/parameters/replica_guard.h"
#include "torch_bindings/reducer/distributed_options.h"
#include "torch_bindings/reducer/round_history.h"

namespace hvd {

/// The buckets of a reducer. Refers to the options and to the context, which are the reducer's.
class ReducerBuckets {
 public:
  /// The time at which gradients are copied to where they are reduced.
  enum class Taking : std::uint8_t {
    ByDevice,  ///< as is best there
    Together,  ///< when their bucket is complete
  };
  /// The gradients that a round leaves as they have become.
  enum class Round : std::uint8_t { Kept, KeptButCompressed, ThrownAway };
  /// The buckets between two rounds: in an order that was learned only before one begins.
  enum class Between : std::uint8_t { SameBuckets, NewOrder };
  enum class Fate : std::uint8_t { Untouched, ThrownAway, Changed };
  /// The parts of the reducer that take part in each round.
  struct Context {
    GradientWeights& weights;
    RoundHistory& history;
    ReplicaComparer& replicas;
    std::function<void(GradientSlot&)> found;  ///< is told of gradients that backward has not given
    std::function<void()> ended;               ///< collective: at the end of a round that succeeds
  };
  ReducerBuckets(std::vector<NamedParameter> parameters, const DistributedOptimizerOptions& options,
                 std::string name, Taking taking, Context context);
  ReducerBuckets(const ReducerBuckets&) = delete;
  ReducerBuckets& operator=(const ReducerBuckets&) = delete;

  [[nodiscard]] std::vector<GradientSlot>& slots() { return slots_; }
  [[nodiscard]] const std::vector<GradientSlot>& slots() const { return slots_; }
  /// Returns the round of the slot's bucket; where it is in none, one that is not submitted.
  [[nodiscard]] GradientRound& round_of(const GradientSlot& slot) {
    return slot.compressed ? compressed_ : buckets_[slot.bucket].round;
  }
  /// Returns whether the gradient is not to be changed now.
  [[nodiscard]] bool is_under_way(const GradientSlot& slot) const;
  /// Returns what has become of the gradients that are under way, and the first that is not as it
  /// was left. `just_given`: backward has added to this one since.
  [[nodiscard]] std::pair<Fate, const GradientSlot*> fate_of_gradients(
      const GradientSlot* just_given = nullptr) const;
  /// Returns whether one has come too late for its bucket.
  [[nodiscard]] bool has_late() const;
  /// Returns whether others may wait for what this rank gave since the last round, or was to give.
  [[nodiscard]] bool has_gathered() const;
  [[nodiscard]] bool has_begun() const { return has_begun_; }
  /// Returns how many ranks' sum the result is: 1 for an average, or where there is one rank.
  [[nodiscard]] int summed_ranks() const;
  [[nodiscard]] std::vector<std::vector<at::Tensor>> parameters() const;
  /// Returns what compresses gradients by a compression that needs a memory; null without one.
  [[nodiscard]] const GradientCompressor* compressor() const { return compressor_.get(); }
  [[nodiscard]] std::uint64_t bytes_sent() const {
    return bytes_sent_ + (compressor_ ? compressor_->bytes_sent() : 0);
  }

  /// Hands shares of what is reduced there, from now on; null: it stays.
  void keep_shares(GradientKeeper* keeper);
  [[nodiscard]] bool keeps_shares() const { return keeper_ != nullptr; }

  /// Begins a round, if none has begun, before anything of it is submitted.
  void begin_round();
  /// Takes in a gradient that backward has given. `is_complete`: submits its bucket, if it was the
  /// last that is awaited.
  void give(GradientSlot& slot, bool is_complete);
  /// Notes that a backward pass was refused: other ranks may go on, and this one takes part in the
  /// round before it forgets it.
  void interrupt() { is_interrupted_ = true; }
  /// Collective. Makes one round.
  void reduce(Round round);
  /// Collective. Makes a round that leaves gradients as they are, for what has been announced.
  void compare();
  /// Collective, unless all ranks have `joined` since. Makes a round of gradients that have been
  /// thrown away since: the other ranks may wait for what this one has given.
  void throw_away(bool joined);
  /// Waits for what this rank has submitted before all have joined.
  void let_finish();
  /// Forgets what has gathered: the next gradient begins a new round.
  void forget();
  /// Has the next gradients live in the buckets: what the last were made in may go with `.grad`.
  void go_home();
  /// Makes memory anew for parameters that have been moved since it was made. Buckets stay, unless
  /// devices have changed, or the order in which gradients come is known now.
  void follow_parameters(Between rounds);

 private:
  void deal();
  void make_room();
  void open(GradientBucket& bucket);
  void take_rest(GradientBucket& bucket, Round round, bool early);
  void ask_for_weights();
  [[nodiscard]] Submission like(const GradientBucket& bucket) const;
  [[nodiscard]] bool scatters(const GradientBucket& bucket) const;
  void submit(GradientBucket& bucket, Round round, bool wait_follows);
  void wait_for(GradientBucket& bucket, Round round);
  void complete(GradientBucket& bucket, Round round);
  void reduce_compressed();
  void reduce_sparse(Round round);
  void put_away(GradientBucket& bucket, Round round, bool early);
  void put_away_what_is_done();
  void drop_shares();
  [[nodiscard]] bool is_first(const GradientBucket& bucket) const {
    return &bucket == &buckets_.front();
  }

  const DistributedOptimizerOptions& options_;
  const std::string name_;
  const Taking taking_;
  const Context context_;
  std::vector<GradientSlot> slots_;
  BucketMemory::Terms memory_terms_;
  std::vector<GradientBucket> buckets_;
  GradientRound compressed_{0};  ///< of the gradients that are in no bucket
  std::unique_ptr<GradientCompressor> compressor_;
  GradientArrivals arrivals_;  ///< followed where buckets are dealt as gradients come
  GradientKeeper* keeper_ = nullptr;
  std::uint64_t bytes_sent_ = 0;  ///< of the buckets
  bool deal_anew_ = false;        ///< before the next round
  bool has_begun_ = false;        ///< something may have been given since the last round
  bool is_interrupted_ = false;   ///< a backward pass was refused since the last round
};

}  // namespace hvd
