#pragma once
/// GradScaler is dynamic loss scaling for fp16 (Micikevicius et al.: Mixed precision training,
/// 2018), with the semantics of PyTorch's torch.amp.GradScaler, which LibTorch's C++ API lacks.
/// Small gradients survive in fp16 because the loss is multiplied by a scale; a step whose
/// gradients overflow is left out and the scale lowered, after many good steps it is raised.
///
/// Where a DistributedOptimizer or a DistributedDataParallel reduces the gradients, the ranks of
/// its process set decide together, whatever other ranks do. One scaler may serve optimizers on
/// several sets: ranks whose scales part, because an optimizer that only some of them have has
/// overflowed, leave out the next common step, with a warning, and go on with the smallest.
/// (Unscaled before the common one, it costs no step.) With int8, topk and powersgd, what the
/// compression remembers does not depend on the scale, and of a step left out nothing is lost.
///
/// The scale is kept on the host. The device is asked, and waited for, once for each optimizer and
/// step: whether anything has overflowed.
///
/// Given the optimizer that a DistributedOptimizer or a MasterWeights is around, it does what it is
/// asked with that wrapper.
///
/// One thread at a time uses it. It owns the scale and refers to optimizers only between `unscale_`
/// and `update`. It refuses (InvalidArgument) fp16 gradients, closures, and an optimizer whose
/// parameters are reduced on several process sets.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// GradScalerOptions are those of a GradScaler; equal on all ranks.
struct GradScalerOptions {
  double init_scale = 65536;    ///< the first scale
  double growth_factor = 2;     ///< greater than 1
  double backoff_factor = 0.5;  ///< less than 1
  std::int64_t growth_interval =
      2000;  ///< steps in a row without an overflow after which the scale grows
  bool enabled =
      true;  ///< false: `scale` returns what it gets, `step` only steps, the rest does nothing
  /// True: a step that one rank must leave out is left out by all ranks of the set (see
  /// `unscale_`). It costs one small allreduce per optimizer and step. False: each rank decides for
  /// itself, which with shard_gradients and ReduceOp::Adasum is an InvalidArgument.
  bool agree = true;
  /// The ranks that agree on optimizers whose gradients nobody reduces. The others' are agreed on
  /// where they are reduced.
  ProcessSet process_set{};
};

/// A GradScalerState is what a continued run needs. It has plain numbers: it can be written, or
/// sent by `broadcast_object`.
struct GradScalerState {
  double scale = 0;                  ///< 0: the state of a scaler that was not enabled
  double growth_factor = 0;          ///< see GradScalerOptions
  double backoff_factor = 0;         ///< see GradScalerOptions
  std::int64_t growth_interval = 0;  ///< see GradScalerOptions
  std::int64_t growth_tracker = 0;   ///< good steps in a row so far
  /// Compares all numbers.
  bool operator==(const GradScalerState&) const = default;
};

/// A GradScaler scales losses, and steps optimizers where nothing has overflowed.
class GradScaler {
 public:
  /// Begins with the first scale. Throws InvalidArgument for factors on the wrong side of 1.
  explicit GradScaler(GradScalerOptions options = {});

  /// Returns `loss` (any shape, any device) times the scale; differentiable.
  at::Tensor scale(const at::Tensor& loss);
  /// Returns each of the losses times the scale.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the optimizer's gradients by the scale, in place, and looks for infinities and NaN
  /// among them: for what comes between backward and `step()`, such as clipping. On a
  /// DistributedOptimizer the reductions are waited for first (as `step()` would; not twice, and
  /// not under `skip_synchronize()`), so the global gradients are scaled and judged, and an
  /// overflow on the wire of a compressed reduction is seen too. Where the library runs and the set
  /// has several ranks this is collective over the set, unless `agree` is false: all ranks call it
  /// for the same optimizers in the same order, plain ones with gradients of their own included,
  /// and if one rank has found an overflow, all leave out the step and lower the scale. Throws
  /// InvalidArgument if called twice, or after `step()`, since the last `update()`; before any
  /// `scale()`; for fp16 gradients. A call that throws divides nothing; after a Mismatch it
  /// may be made again.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Does `unscale_(optimizer)`, if that was not done already, then `optimizer.step()`, unless an
  /// overflow was found: then the step is left out and an undefined tensor returned. Throws
  /// InvalidArgument with a closure; if called twice since the last `update()`; if no rank has any
  /// gradient.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// Lowers the scale if a step was left out, raises it after `growth_interval` good ones in a row.
  /// To be called after the steps of all optimizers. Throws InvalidArgument if no optimizer was
  /// unscaled since the last one.
  void update();
  /// Sets the scale.
  void update(double new_scale);

  /// Returns the scale; 1 if it is not enabled.
  [[nodiscard]] double get_scale() const;
  /// Returns GradScalerOptions::enabled.
  [[nodiscard]] bool is_enabled() const { return options_.enabled; }

  /// Returns what a continued run needs.
  [[nodiscard]] GradScalerState state() const;
  /// Goes on from such a state. Does nothing if it is not enabled. Throws InvalidArgument for the
  /// state of a scaler that was not.
  void load_state(const GradScalerState& state);

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct Record {
    Stage stage = Stage::Ready;
    bool has_gradients = false;  ///< on some rank
    at::Tensor unread;           ///< the device's float32: 0 without overflow; undefined once read
    bool has_overflowed = false;
    bool scales_differ = false;
  };

  void check_scaled(const char* what) const;
  void start();
  static at::Tensor multiply(torch::optim::Optimizer& optimizer, double factor);
  static bool read(Record& record);
  void agree(Record& record, const ProcessSet& process_set);
  [[nodiscard]] bool agrees_with(const ProcessSet& process_set) const;
  void refuse(const ProcessSet& process_set, const std::string& why) const;
  [[nodiscard]] bool has_overflowed();
  void forget();

  GradScalerOptions options_;
  std::shared_ptr<float> scale_;  ///< null before the first loss; compressors look at it
  std::int64_t growth_tracker_ = 0;
  // Since the last update.
  std::unordered_map<const torch::optim::Optimizer*, Record> records_;
  bool found_elsewhere_ = false;  ///< by a rank in another optimizer that it shares with this one
  double lowest_scale_ = 0;  ///< of ranks whose scales have parted from this one's; 0 if none has
};

}  // namespace hvd
#pragma GCC visibility pop
