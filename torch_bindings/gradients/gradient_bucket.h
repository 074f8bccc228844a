#pragma once
/// The state that a reducer follows from round to round: of each parameter's gradient, and of a
/// bucket of those that travel together. Thread: the reducer's, under its lock, without recording
/// of gradients.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/gradients/bucket_memory.h"
#include "torch_bindings/gradients/gradient_mark.h"
#include "torch_bindings/gradients/gradient_round.h"
#include "torch_bindings/gradients/gradient_weights.h"
#include "torch_bindings/platform/stream_set.h"

namespace hvd {

/// The port to which a GradientReducer gives reduced gradients that it does not leave in `.grad`:
/// each rank keeps its share of them, and the rest of their memory is free again (ZeRO stage 2).
/// Nobody is sent what it does not keep. Called in autograd's threads and the optimizer's, one at a
/// time for each parameter. Errors: none of its own.
class GradientKeeper {
 public:
  virtual ~GradientKeeper() = default;
  /// Returns how many elements of the parameter's gradient each rank of the process set keeps, in
  /// the order of the ranks and of the parameter's memory. It is the same on all ranks.
  [[nodiscard]] virtual const std::vector<std::int64_t>& parts(
      const at::Tensor& parameter) const = 0;
  /// Adds this rank's part of `reduced`, the gradient of all ranks, to what is kept of the
  /// parameter's; the rest of it is not read. `reduced` may be of another type, and its memory ends
  /// with the call.
  virtual void keep(const at::Tensor& parameter, const at::Tensor& reduced) = 0;
  /// Forgets what is kept of it.
  virtual void drop(const at::Tensor& parameter) = 0;
};

/// One parameter's gradient.
struct GradientSlot {
  /// The kind of tensor that memory for it is made for.
  struct Kind {
    at::ScalarType type = at::kFloat;
    at::Device device{at::kCPU};
    std::vector<std::int64_t> sizes;
    explicit Kind(const at::Tensor& parameter)
        : type(parameter.scalar_type()),
          device(parameter.device()),
          sizes(parameter.sizes().vec()) {}
    [[nodiscard]] bool is_of(const at::Tensor& parameter) const {
      return type == parameter.scalar_type() && device == parameter.device() &&
             parameter.sizes() == at::IntArrayRef(sizes);
    }
  };
  /// The tensor that has been multiplied by its rank's weight: the gradient itself, or a copy of it
  /// that travels.
  enum class Weighed : std::uint8_t { No, Itself, Copy };

  explicit GradientSlot(NamedParameter whose) : named(std::move(whose)), kind(named.parameter) {}
  [[nodiscard]] at::Tensor& gradient() const { return named.parameter.mutable_grad(); }
  [[nodiscard]] detail::GradientMark::Since since_mark() const { return mark.since(gradient()); }
  [[nodiscard]] bool is_replaced() const {
    return since_mark() == detail::GradientMark::Since::Replaced;
  }
  /// Returns whether `.grad`, which is defined, is dense and all zeros.
  [[nodiscard]] bool is_zero() const;
  void set_mark() { mark.set(gradient()); }
  /// Makes a sparse gradient dense, or knows from then on that they are sparse.
  void follow_layout(bool sparse_as_dense);
  /// Divides what is a sum over so many ranks already: it enters the next one in equal parts.
  void share_out(int ranks);
  /// Converts the gradient to what the parameter is now. Throws InvalidArgument for another shape.
  void convert();

  NamedParameter named;
  Kind kind;
  bool compressed = false;       ///< goes by a compression that needs a memory, in no bucket
  bool reduced = false;          ///< `.grad` is what a round gave, the same on all ranks
  std::int64_t sparse_dims = 0;  ///< of its gradients, where they are sparse on some rank: they
                                 ///< travel on their own
  std::size_t bucket = 0;
  std::size_t member = 0;         ///< of the bucket, or of what is compressed
  int passes = 0;                 ///< backward passes since the last step that gave a gradient
  detail::GradientMark mark;      ///< `.grad` as it was left
  Weighed weighed = Weighed::No;  ///< in this round
  std::optional<unsigned> before_hook;  ///< is called before backward adds to `.grad`
  at::Tensor before;  ///< with Sum: what a gradient is added to, where that is reduced already
};

/// Gradients that travel together: one submission. Its members are slots of a reducer, which stay
/// where they are.
struct GradientBucket {
  GradientBucket(std::string called, std::vector<GradientSlot*> members,
                 const BucketMemory::Terms& terms);
  /// Returns the parameter of its first member: all were of one kind when they were dealt.
  [[nodiscard]] const at::Tensor& parameter() const { return slots.front()->named.parameter; }

  /// Makes the current stream wait for those on which backward has given its gradients, and takes
  /// in what is present where a bucket's gradients are taken in together. `are_thrown_away`: as
  /// zeros.
  void take_in_together(bool are_thrown_away);
  /// Multiplies what is sent by this rank's weight, in place.
  void weigh(const GradientWeights& weights);
  /// Divides what was sent again after a failed round, so that it can be reduced once more.
  void put_back_weighed(double factor);
  /// Makes the gradients that the backend was to copy what they were.
  void put_given_back();
  /// Makes `.grad` what the round gave. `share`: of that in a gradient which has come late, to be
  /// summed over the ranks once more.
  void give_back(double share);
  /// Collective. Tells all ranks which gradients are sparse. Returns whether that brought anything
  /// new to any rank.
  bool learn_sparse(const ProcessSet& process_set);

  std::string name;
  std::vector<GradientSlot*> slots;  ///< by member
  BucketMemory memory;
  GradientRound round;
  detail::StreamSet streams;  ///< on which backward has given gradients since the last submission
};

}  // namespace hvd
