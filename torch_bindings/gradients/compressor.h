#pragma once
/// Gradients that travel lossily compressed, with a memory of what was left out, which is added to
/// the next step's gradients (error feedback: Seide et al. 2014; Karimireddy et al. 2019), so that
/// nothing is lost but only late.
///   int8      blocks of 256 values with a scale each (Dettmers 2016). Each rank sums one part of
///             all gradients and sends the sum on, rounded again, with a memory of its own
///             (DoubleSqueeze, Tang et al. 2019): an error is at most half a step of the scale,
///             which is the block's largest magnitude / 127, once for each rank's values and once
///             for the sum.
///   topk      the values of largest magnitude of each tensor, as indices and values (Aji and
///             Heafield 2017; Lin et al. 2018).
///   powersgd  a matrix M (first dimension by all others) as P Q^T, P orthonormal, by one step of
///             subspace iteration from the last Q (Vogels, Karimireddy, Jaggi 2019). Tensors with
///             fewer than two dimensions, or too small to gain, travel as they are.
/// All ranks get the same bits. What is encoded is `.grad` as it is when gradients are reduced:
/// who changes it between backward() and that, as by clipping, changes this rank's part, and no
/// error says so. Sparse gradients become dense. Where a gradient is not finite,
/// neither is the result, and what was remembered there is dropped. The memory has the size of the
/// gradients, in fp32 or fp64, on each rank. With loss scaling it is kept in units of the gradients
/// without the scale, which may change from step to step; and of a step that is left out nothing is
/// lost that was remembered before it, for which a copy of the memory is kept (in the first step,
/// and from the one on in which a GradScaler has been seen). Thread: one at a time. Errors:
/// Mismatch where the ranks' tensors differ; what collectives throw.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

/// The compressor of some parameters' gradients.
class GradientCompressor {
 public:
  using Parameters = std::vector<std::pair<std::string, at::Tensor>>;
  struct Terms {
    Compression compression;
    ReduceOp op = ReduceOp::Average;
    double predivide_factor = 1;
    ProcessSet process_set;
    std::string name;  ///< of its collectives
  };
  /// Local. All of `parameters` must be ones that are encoded (`detail::is_encoded`).
  static std::unique_ptr<GradientCompressor> make(Terms terms, Parameters parameters);
  virtual ~GradientCompressor();
  GradientCompressor(const GradientCompressor&) = delete;
  GradientCompressor& operator=(const GradientCompressor&) = delete;

  // What GradScaler tells all who compress gradients of these parameters, an optimizer's. Local.
  using Tensors = std::vector<at::Tensor>;
  /// Before the reduction, if it is still to come: gradients are multiplied by `scale`, which
  /// changes, as long as that lives.
  static void follow_scale(const Tensors& parameters, const std::shared_ptr<const float>& scale);
  /// After the reduction: one that did not know of the scale yet counts as if it had.
  static void correct_scale(const Tensors& parameters);
  /// After the step; `left_out`: what is remembered of these parameters is again what it was before
  /// the reduction.
  static void end_step(const Tensors& parameters, bool left_out);

  /// Collective. Every parameter's `.grad` becomes that of all ranks together; one that has none on
  /// any rank stays without. Throws Mismatch, on all ranks, where `also_compared` differs; empty,
  /// it costs nothing. `factor`, if there is one, is asked once, when the ranks have agreed, and
  /// may be collective: this rank's gradients are multiplied by what it returns, and are zeros if
  /// that is 0.
  void reduce(const Shape& also_compared = {}, const std::function<double()>& factor = nullptr);
  /// Collective. Throws Mismatch, on all ranks, if they compare different shapes, or some reduce.
  void compare(const Shape& shape);
  /// Returns what this rank remembers, in a fixed order; it may be written to.
  [[nodiscard]] virtual std::vector<at::Tensor> memory() const { return residuals_; }
  /// Bytes sent to other ranks so far, if each collective sends as few as it can.
  [[nodiscard]] std::uint64_t bytes_sent() const { return bytes_sent_; }

 protected:
  GradientCompressor(Terms terms, Parameters parameters);
  /// Exchanges the gradients of the parameters whose numbers are in `active`. `residuals_` hold
  /// them with what was left out before; afterwards what is left out now. Returns the reduced
  /// gradients, in the type and memory order of the residuals.
  virtual std::vector<at::Tensor> exchange(const std::vector<std::size_t>& active) = 0;
  /// Returns how many tensors of `memory()`, from its beginning on, are in units of the gradients.
  [[nodiscard]] virtual std::size_t remainders() const { return memory().size(); }
  /// Returns the factor by which gradients are multiplied before they are added up.
  [[nodiscard]] double gradient_factor() const { return 1 / (terms_.predivide_factor * unit_); }
  /// The user's average or sum, from the sum of all ranks.
  [[nodiscard]] at::Tensor finish(at::Tensor sum) const;
  [[nodiscard]] std::string name(const char* part) const { return terms_.name + "/" + part; }
  void count_allreduce(std::uint64_t bytes);
  void count_allgather(std::uint64_t own_bytes);
  void count_alltoall(std::uint64_t own_bytes);

  const Terms terms_;
  const Parameters parameters_;
  const std::int64_t ranks_;
  const std::int64_t self_;
  std::vector<at::Tensor>
      residuals_;  ///< one for each parameter, in its memory order if that is dense; fp32 or fp64

 private:
  struct Living;
  static Living& living();
  [[nodiscard]] double scale() const;
  void keep_memory();
  void correct_scale();
  void end_step(const std::unordered_set<const void*>& parameters, bool left_out);
  void check_alike();
  std::vector<std::size_t> agree_on_present(const Shape& also_compared);

  bool checked_ = false;
  std::optional<std::weak_ptr<const float>> scale_;  ///< of a GradScaler
  double unit_ = 1;         ///< the scale of the gradients of the last reduction
  Tensors before_;          ///< `memory()` before the last reduction; empty if it is not kept
  std::vector<bool> open_;  ///< of each parameter: reduced, and the GradScaler has not judged it
  std::uint64_t bytes_sent_ = 0;
};

}  // namespace hvd
