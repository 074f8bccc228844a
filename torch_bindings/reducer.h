#pragma once
/// Room card: the gradients of one optimizer on their way. Parameters are dealt to buckets, in the order in which backward gives
/// their gradients; a bucket is one submission, made when its last gradient is there, or by `synchronize()`.
/// `on_gradient` runs in autograd's threads, several at once; the rest in the optimizer's. One mutex.
/// Owns the buckets' memory, which `.grad` is a view of: it is reduced where it is. On the host that is memory that its ranks share; on a
/// GPU what the backend lends, where it gains from it (Backend::allocate). On the host a gradient is copied there when backward gives it,
/// from the cache; on a GPU all of a bucket by one launch, when it is complete.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/compressor.h"
#include "torch_bindings/optimizer.h"
#include "torch_bindings/reduced_on.h"

namespace hvd {

namespace detail {
class JoinRounds;
}

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  struct Named {
    std::string name;
    at::Tensor parameter;
  };
  /// When gradients are copied to where they are reduced.
  enum class Taking : std::uint8_t {
    ByDevice,  ///< as is best there
    Together,  ///< when their bucket is complete
  };
  /// `number` tells the optimizers of a process apart, equally on all ranks; `kind` what else has gradients reduced; `part` what one of
  /// them has several of.
  GradientReducer(std::vector<Named> parameters, DistributedOptimizerOptions options, int number, const std::string& kind = "optimizer",
                  Taking taking = Taking::ByDevice, const std::string& part = "");

  ~GradientReducer() { give_up_claims(); }
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Throws InvalidArgument, naming the parameter, if another kind of wrapper has gradients of one of these reduced at present: one
  /// backward pass would reduce them twice. Local.
  static void refuse_twice(const std::vector<Named>& parameters, const std::string& kind);

  /// Puts the hooks on the parameters, which keep this alive only as long as somebody else does; `unhook` takes them off.
  void hook();
  void unhook();
  /// `wanted` is asked, in autograd's threads, before each gradient is taken in as backward gives it; those that it does not want are
  /// found by `synchronize()`. Set before `hook()`.
  void ask(std::function<bool()> wanted) { wanted_ = std::move(wanted); }
  /// While it is set, ranks may have joined: each `synchronize()` ends with a round of it (torch_bindings/join.h).
  void set_join(std::shared_ptr<detail::JoinRounds> join);
  [[nodiscard]] bool is_joining() const { return join_ != nullptr; }

  void synchronize();
  [[nodiscard]] bool is_synchronized() const;
  /// Before gradients are thrown away: waits for what is under way and forgets what has gathered.
  void settle();
  /// After a step: what comes next is new.
  void begin_step();
  void set_passes(int passes);
  /// Collective. The loss of all ranks together, as their gradients are.
  [[nodiscard]] at::Tensor reduce_loss(const at::Tensor& loss) const;
  [[nodiscard]] std::vector<at::Tensor> compression_memory() const;
  [[nodiscard]] std::uint64_t bytes_sent() const;
  /// Whether gradients travel by a compression that needs a memory.
  [[nodiscard]] bool has_compressor() const { return compressor_ != nullptr; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const ProcessSet& process_set() const { return options_.process_set; }
  /// Returns the parameters, each once, with their names.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> parameters() const;
  /// The next reduction that starts also compares this between the ranks: what differs is a Mismatch on all of them. Costs an empty tensor.
  void announce(Shape layout);

 private:
  struct Slot {
    Named named;
    bool compressed = false;  ///< goes by `compressor_`, in no bucket
    std::size_t bucket = 0;
    at::Tensor home;  ///< where the gradient lives: memory of the bucket, in the parameter's layout; undefined if another type travels
    at::Tensor wire;  ///< what travels: `home`, or its 16-bit form; where the bucket has no memory the gradient itself, or that
    int passes = 0;   ///< backward passes since the last step that gave a gradient
    bool ready = false;
    bool present = false;  ///< this rank has a gradient
    bool sparse = false;   ///< its gradients are sparse, here or on another rank: they travel on their own, after the bucket
  };
  struct Bucket {
    std::string name;
    std::vector<std::size_t> slots;
    std::size_t ready = 0;
    bool submitted = false;
    bool together = false;  ///< see Taking
    std::shared_ptr<Pending> pending;
    std::shared_ptr<void> memory;  ///< of the slots' `wire`; null on a device that has none to lend
  };

  /// Who has whose gradients reduced, in this process.
  struct Claims;
  static std::shared_ptr<Claims> claims();
  void give_up_claims() noexcept;

  void make_compressor();
  void reduce(bool also_compressed);
  void end_join_round();
  void deal(const DistributedOptimizerOptions& options);
  void add_bucket(std::vector<std::size_t> slots);
  void make_room(Taking taking);
  void make_room(std::span<Bucket> buckets);
  template <class Terms>
  void scale(Terms& terms) const;
  [[nodiscard]] Submission like(const Bucket& bucket) const;
  void on_gradient(std::size_t slot);
  void take_in(Slot& slot);
  void pack(Slot& slot);
  void take_in_together(Bucket& bucket);
  void submit(Bucket& bucket, bool wait_follows);
  void give_back(Bucket& bucket);
  void wait_for(Bucket& bucket);
  bool learn_sparse(Bucket& bucket);
  void reduce_sparse();
  void forget();
  [[nodiscard]] DataType wire_type(const Slot& slot) const;
  [[nodiscard]] bool travels_compressed(const Slot& slot) const;

  mutable std::mutex mutex_;
  const DistributedOptimizerOptions options_;
  detail::ReducedOn reduced_on_{options_.process_set};
  const std::string kind_;
  const std::string name_;                           ///< "optimizer.0"
  const std::shared_ptr<Claims> claims_ = claims();  ///< they outlive every reducer
  bool hooked_ = false;
  int passes_per_step_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::unique_ptr<GradientCompressor> compressor_;  ///< null without a compression that needs a memory
  std::uint64_t bytes_sent_ = 0;                    ///< of the buckets
  Shape announced_;                                 ///< what `announce()` was given, until a reduction has compared it
  bool announcing_ = false;                         ///< the first bucket under way compares it
  bool synchronized_ = false;
  std::function<bool()> wanted_;  ///< null: all are
  std::shared_ptr<detail::JoinRounds> join_;
};

}  // namespace hvd
