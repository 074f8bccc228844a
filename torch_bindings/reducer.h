#pragma once
/// The gradients of one optimizer on their way. Parameters are dealt to buckets, in the order in which backward gives
/// their gradients; a bucket is one submission, made when its last gradient is there, or by `synchronize()`.
/// `on_gradient` runs in autograd's threads, several at once; the rest in the optimizer's. One mutex.
/// Owns the buckets' memory (torch_bindings/bucket_memory.h), which `.grad` is a view of: it is reduced where it is.
///
/// On a GPU, where the user has made no groups, buckets are dealt as PyTorch's DDP deals them: the first is small, so that something
/// travels early, and after the first round all are dealt anew, in the order in which backward gave the gradients on the set's first rank.
///
/// A round is one reduction of all buckets. Parameters that require no gradient hold no bucket up, and count as zeros where another rank
/// has a gradient. What `.grad` holds after a round is the same on all ranks; a later round reduces what has come since, and no more.
/// Each round's submissions say which it is (torch_bindings/round_history.h): ranks that are in another one get a Mismatch.
/// A round in which gradients have weights begins with their sum, under the name that the first bucket has in any other round: so ranks
/// that have none meet it there, as a Mismatch.
/// A gradient that is on its way is marked (torch_bindings/gradient_mark.h): if all of them have been thrown away when the next one
/// comes, or at `synchronize()`, the round is finished for the other ranks and forgotten; if some have been changed, `synchronize()`
/// throws InvalidArgument. Parameters that have got another type, device or shape get other memory before the next round.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/bucket_memory.h"
#include "torch_bindings/compressor.h"
#include "torch_bindings/distributed_options.h"
#include "torch_bindings/gradient_arrivals.h"
#include "torch_bindings/gradient_mark.h"
#include "torch_bindings/gradient_memory.h"
#include "torch_bindings/gradient_owners.h"
#include "torch_bindings/gradient_round.h"
#include "torch_bindings/gradient_weights.h"
#include "torch_bindings/replica_guard.h"
#include "torch_bindings/round_history.h"
#include "torch_bindings/stream_set.h"

namespace hvd {

namespace detail {
class JoinRounds;
class StepWatch;
}  // namespace detail

class GradientKeeper;

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  using Named = NamedParameter;
  /// When gradients are copied to where they are reduced.
  enum class Taking : std::uint8_t {
    ByDevice,  ///< as is best there
    Together,  ///< when their bucket is complete
  };
  /// `number` tells the optimizers of a process apart, equally on all ranks; `kind` what else has gradients reduced; `part` what one of
  /// them has several of.
  GradientReducer(std::vector<Named> parameters, DistributedOptimizerOptions options, int number, const std::string& kind = "optimizer",
                  Taking taking = Taking::ByDevice, const std::string& part = "");

  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Puts the hooks on the parameters, which keep this alive only as long as somebody else does; `unhook` takes them off. A user's own
  /// hook on a parameter goes on being called.
  void hook();
  void unhook();
  /// Puts hooks back that a user's own have taken the place of. Not while backward runs.
  void hook_again();
  /// `wanted` is asked, in autograd's threads, before each gradient is taken in as backward gives it; those that it does not want are
  /// found by `synchronize()`. Set before `hook()`.
  void ask(std::function<bool(const Named&)> wanted) { wanted_ = std::move(wanted); }
  /// From now on it is told of each gradient that backward gives, and where it knows that the optimizer was stepped by itself the pass is
  /// refused. Set before `hook()`.
  void set_witness(std::shared_ptr<detail::StepWatch> witness) { witness_ = std::move(witness); }
  /// Whether gradients are taken in as backward gives them. Those that came meanwhile are found by `synchronize()`.
  void listen(bool on);
  /// From now on gradients that are reduced go there, this rank's share of them, and `.grad` is undefined then; null: they stay. Between
  /// two rounds.
  void keep_shares(GradientKeeper* keeper);
  /// While it is set, ranks may have joined: each `synchronize()` ends with a round of it (torch_bindings/join.h).
  void set_join(std::shared_ptr<detail::JoinRounds> join);
  [[nodiscard]] bool is_joining() const { return join_ != nullptr; }
  [[nodiscard]] const std::shared_ptr<detail::JoinRounds>& join_rounds() const { return join_; }

  /// Reduces what is not reduced yet: nothing if a finished call did that already and nothing has come since (a gradient that a user has
  /// put in place of one that was reduced counts as new).
  void synchronize();
  [[nodiscard]] bool is_synchronized() const;
  /// Begins a round in which gradients have weights, if none has begun: ranks that wait in backward for the sum of the weights need this
  /// one's, whatever it waits for.
  void tell_weight();
  /// Reduces whatever there is, for those who call it at the end of each backward pass.
  void finish_pass();
  /// Before a closure is evaluated: `synchronize()` is to reduce after it, whatever came before.
  void begin_evaluation();
  /// Before gradients are thrown away: waits for what is under way and forgets what has gathered.
  void settle();
  /// After a step: what comes next is new.
  void begin_step();
  void set_passes(int passes);
  /// Until the next step this rank's gradients count so much in averages: sum(w * g) / sum(w) over the ranks; none: as much as the others'.
  /// All ranks must have one, or none (else Mismatch on all of them, in the round). Throws InvalidArgument once backward has begun.
  void set_weight(std::optional<double> weight);
  [[nodiscard]] std::optional<double> weight() const;
  /// Throws what `set_weight` would.
  void refuse_late_weight() const;
  /// Collective. The loss of all ranks together, as their gradients are. With a `refusal` on any rank all throw Mismatch, with its words.
  [[nodiscard]] at::Tensor reduce_loss(const at::Tensor& loss, const std::string& refusal = {}) const;
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;
  [[nodiscard]] std::uint64_t bytes_sent() const;
  /// Whether gradients travel by a compression that needs a memory.
  [[nodiscard]] bool has_compressor() const { return compressor_ != nullptr; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const ProcessSet& process_set() const { return options_.process_set; }
  /// Returns whether one of the parameters requires a gradient now.
  [[nodiscard]] bool requires_gradients() const;
  /// Returns the parameters, each once, with their names.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> parameters() const;
  /// Returns the parameters whose gradients travel together.
  [[nodiscard]] std::vector<std::vector<at::Tensor>> parameters_by_bucket() const;
  /// The next round also compares this between the ranks: what differs is a Mismatch on all of them. Costs an empty tensor. Call it where
  /// all ranks are between two rounds. `said`: of this rank, where there is a difference; none: that parameters or groups have changed.
  void announce(Shape layout, std::string said = {});
  /// Collective. Compares it at once, in a round of its own that leaves all gradients as they are. A rank that calls it alone gets the
  /// Mismatch together with the others, when these make their next round. Call it after a round that is complete.
  void compare(Shape layout, std::string said = {});
  /// From now on each round compares these, too, between the ranks (torch_bindings/replica_guard.h).
  void watch(ReplicaComparer::Terms terms);
  /// Collective. Compares what each round compares slice by slice, all of it at once. Throws Mismatch, on all ranks, where it differs.
  void check_replicas();

 private:
  /// What memory for a parameter's gradient is made for.
  struct Kind {
    at::ScalarType type = at::kFloat;
    at::Device device{at::kCPU};
    std::vector<std::int64_t> sizes;
    explicit Kind(const at::Tensor& parameter)
        : type(parameter.scalar_type()), device(parameter.device()), sizes(parameter.sizes().vec()) {}
    [[nodiscard]] bool is_of(const at::Tensor& parameter) const {
      return type == parameter.scalar_type() && device == parameter.device() && parameter.sizes() == at::IntArrayRef(sizes);
    }
  };
  /// What has been multiplied by its rank's weight: the gradient itself, or a copy of it that travels.
  enum class Weighed : std::uint8_t { No, Itself, Copy };
  struct Slot {
    explicit Slot(Named whose) : named(std::move(whose)), kind(named.parameter) {}
    Named named;
    Kind kind;
    bool compressed = false;  ///< goes by `compressor_`, in no bucket
    std::size_t bucket = 0;
    std::size_t member = 0;               ///< of the bucket, or of what is compressed
    int passes = 0;                       ///< backward passes since the last step that gave a gradient
    bool sparse = false;                  ///< its gradients are sparse, here or on another rank: they travel on their own, after the bucket
    bool reduced = false;                 ///< `.grad` is what a round gave, the same on all ranks
    detail::GradientMark mark;            ///< `.grad` as it was left
    Weighed weighed = Weighed::No;        ///< in this round
    std::optional<unsigned> before_hook;  ///< with Sum: sees a gradient before it is added to one that is reduced already
    at::Tensor before;                    ///< that one
  };
  enum class Fate : std::uint8_t { Untouched, ThrownAway, Changed };
  enum class Round : std::uint8_t { Kept, KeptButCompressed, ThrownAway };
  /// Whether buckets may be dealt in an order that was learned: before a round.
  enum class Between : std::uint8_t { SameBuckets, NewOrder };
  struct Bucket {
    std::string name;
    std::vector<std::size_t> slots;
    BucketMemory memory;
    GradientRound round;
    detail::StreamSet streams;  ///< on which backward has given its gradients since it was submitted last
  };

  void make_compressor();
  void begin_round();
  void ask_for_weights();
  void weigh(Bucket& bucket);
  void put_back_weighed();
  struct Outcome;
  Outcome synchronize_gradients();
  void end_join_round();
  void put_hook(std::size_t slot);
  void reduce(Round round);
  void reduce_until_none_is_late();
  void submit_all(Round round);
  void finish(Round round);
  void throw_away();
  void follow_parameters(Between rounds);
  void convert_gradient(Slot& slot);
  void deal();
  void make_room();
  void scale(AllreduceOptions& terms) const;
  [[nodiscard]] Submission like(const Bucket& bucket) const;
  [[nodiscard]] bool scatters(const Bucket& bucket) const;
  void scatter(const Slot& slot, TensorArgument& argument) const;
  void on_gradient(std::size_t slot);
  [[noreturn]] void refuse(const std::string& text);
  void before_gradient(std::size_t slot);
  void begin_pass(const Slot& first);
  void count(Slot& slot);
  [[nodiscard]] GradientRound& round_of(const Slot& slot) { return slot.compressed ? compressed_ : buckets_[slot.bucket].round; }
  [[nodiscard]] const GradientRound& round_of(const Slot& slot) const {
    return slot.compressed ? compressed_ : buckets_[slot.bucket].round;
  }
  [[nodiscard]] bool is_under_way(const Slot& slot) const;
  [[nodiscard]] std::pair<Fate, const Slot*> fate_of_gradients(const Slot* just_given = nullptr) const;
  void keep_changes();
  [[nodiscard]] bool given_anew() const;
  [[nodiscard]] bool sums() const { return options_.op == ReduceOp::Sum && options_.process_set.size() > 1; }
  void share_out(Slot& slot);
  void take_rest(Bucket& bucket, Round round, bool early);
  void take_in(Slot& slot, bool just_given);
  void pack(Slot& slot);
  void take_in_together(Bucket& bucket, Round round, bool other_streams);
  void submit(Bucket& bucket, Round round, bool wait_follows);
  void give_back(Bucket& bucket);
  void open(Bucket& bucket);
  void put_away(Bucket& bucket, Round round, bool early);
  void put_away_what_is_done();
  void put_given_back(Bucket& bucket);
  [[nodiscard]] bool deals_as_gradients_come() const;
  void drop_shares();
  void refuse_with_shares(const Slot& slot);
  void refuse_replaced() const;
  void wait_for(Bucket& bucket, Round round);
  void complete(Bucket& bucket, Round round);
  void reduce_compressed();
  [[nodiscard]] Mismatch explained(const Mismatch& error, const Bucket& bucket) const;
  bool learn_sparse(Bucket& bucket);
  void reduce_sparse(Round round);
  void forget();

  detail::HostMemoryUser uses_host_memory_;  // outlives all that has some
  mutable std::mutex mutex_;
  const DistributedOptimizerOptions options_;
  const Taking taking_;
  detail::GradientOwner owner_;
  const std::string name_;  ///< "optimizer.0"
  bool hooked_ = false;
  int passes_per_step_;
  std::vector<Slot> slots_;
  BucketMemory::Terms memory_terms_;
  std::vector<Bucket> buckets_;
  ReplicaComparer replicas_;
  RoundHistory history_;
  GradientRound compressed_{0};                     ///< of the gradients that are in no bucket
  std::unique_ptr<GradientCompressor> compressor_;  ///< null without a compression that needs a memory
  std::uint64_t bytes_sent_ = 0;                    ///< of the buckets
  bool synchronized_ = false;
  GradientArrivals arrivals_;                   ///< followed where buckets are dealt as gradients come
  bool deal_anew_ = false;                      ///< before the next round
  GradientWeights weights_;                     ///< see set_weight
  std::function<bool(const Named&)> wanted_;    ///< null: all are
  std::shared_ptr<detail::StepWatch> witness_;  ///< null: nobody asks
  std::shared_ptr<detail::JoinRounds> join_;
  double join_factor_ = 1;  ///< what the last round has multiplied averages by
  GradientKeeper* keeper_ = nullptr;
  bool shares_kept_ = false;  ///< it has gradients of a whole round
  bool listening_ = true;
  bool round_begun_ = false;  ///< something may have been given since the last round
  bool interrupted_ = false;  ///< a backward pass was refused since the last round
  int last_pass_ = -1;        ///< the backward pass that the last gradient came from
};

}  // namespace hvd
