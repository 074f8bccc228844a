#pragma once
/// A Checkpoint is the state of a training run in a file. It is written by one rank, whole or not
/// at all: into a new file beside the old one, fsync, rename, fsync of the folder. The file is an
/// archive of torch::save, with "model" and "optimizer" in it as LibTorch writes them.
///
/// Beside what the user gives it holds the state of every rank's random numbers (LibTorch's default
/// generators), what lossy compression remembers, and the buffers of ranks that differ from the
/// first one's (batch norm's running statistics, and averages of them). It does not hold gradients.
/// What else trains is given to `save` and `load` as parts: schedules, GradScaler,
/// ExponentialMovingAverage, ElasticSampler, other generators; LibTorch's own schedulers have no
/// state that could be saved. With these a run that was saved between two steps, and goes on with
/// as many ranks, goes on with the same bits; but where items of an epoch come twice (Shares::Pad),
/// others do after a load in the middle of one. Another number of ranks can read the file too: the
/// state of a sharded optimizer is whole in it, and what belongs to single ranks begins anew.
///
/// Memory on the host: the rank that writes needs as much as the file for a sharded optimizer,
/// whose state it gathers in portions, and for what belongs to single ranks; the others need a few
/// MiB. `load` needs on each rank what that rank keeps: parameters are filled where they are, and
/// the state comes as its share. Parts, an optimizer of the user's own, LBFGS, MasterWeights, and
/// models on a GPU need the file's size once more while they are read.
///
/// Tied weights are one tensor in the file, and their optimizer state is there once; such a file
/// loads into an untied model whose optimizer has as many parameters, and a file of an untied model
/// into a tied one if the values are equal.
///
/// One thread at a time uses it; all functions are collective over the process set. They throw
/// CheckpointError on all ranks if any rank fails (to read a file that does not fit, say), with
/// that rank's reason, the old file and the program's state as they were, and Mismatch on all ranks
/// if what they save differs. Nothing stays open.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/hvd.h"
#include "torch_bindings/checkpoint/checkpoint_part.h"
#include "torch_bindings/platform/held_module.h"

namespace hvd::detail {
class CheckpointFile;
class OptimizerLoad;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd {

/// CheckpointOptions say what a Checkpoint keeps, and what it has besides model and optimizer.
struct CheckpointOptions {
  /// The number of files that stay: `path` is the one written last, whatever its step, `path`.1 the
  /// one before, and so on. At least 1. Two Checkpoints in a folder do not meet unless one's path
  /// is another's `path`.N.
  int keep_last = 1;
  /// True: `load` sets the optimizer's options (learning rate, betas...) to those in the file.
  /// False: it leaves the program's.
  bool load_options = true;
  /// True: the state of the random numbers (CPU, and the current GPU's where the module is on one)
  /// is saved and loaded.
  bool random_state = true;
  /// True: the model in the file has the means of the ranks' buffers (see AveragedBuffers), for
  /// readers with another number of ranks. False: it has the first rank's. The same on all ranks.
  bool average_buffers = false;
  /// More tensors that belong to each rank alone, asked for by `save`, and by `load` to be filled
  /// in place if as many ranks read the file and they have the same shapes and types:
  /// DistributedDataParallel::compression_memory (that of a DistributedOptimizer is in anyway). If
  /// it throws on any rank, `save` and `load` throw CheckpointError on all, with its words.
  std::function<std::vector<at::Tensor>()> of_rank{};
  ProcessSet process_set{};  ///< the ranks that save and load together
};

/// A CheckpointExtra is what else belongs to the run: epoch, sampler, scaler... The first rank's is
/// saved, and all ranks get it.
struct CheckpointExtra {
  std::map<std::string, std::string> strings{};  ///< by any names
  std::map<std::string, at::Tensor> tensors{};   ///< by any names
};

/// A Checkpoint saves and loads one file.
class Checkpoint {
 public:
  using Extra = CheckpointExtra;  ///< what else belongs to the run

  /// Touches no file yet; local. `path`: of a file; its folder is made by `save` if it is missing.
  /// Throws InvalidArgument for an empty path or keep_last < 1.
  explicit Checkpoint(std::string path, CheckpointOptions options = {});

  /// Writes parameters and buffers of the module, state and options of the optimizer. The first
  /// rank's are written. All ranks must have the same parameters: Mismatch on all if they differ,
  /// as DistributedOptimizer::check_replicas() throws it, unless HVD_REPLICA_GUARD is off. Throws
  /// Mismatch, on all ranks, if their buffers differ in number, name, shape or type, naming the
  /// first that do, if their steps do, or if only some ranks shard the optimizer. An optimizer of
  /// the user's own is saved by its `save`, and by the `serialize` of its options and states, its
  /// learning rate by get_lr; CheckpointError on all ranks if it has a state and overrides neither.
  /// `module`: a module, or what holds one: a ModuleHolder, such as torch::nn::Linear, or a
  /// std::shared_ptr; InvalidArgument, on that rank, for a null pointer.
  template <detail::HoldsModule Held>
  void save(const Held& module, torch::optim::Optimizer& optimizer, std::int64_t step,
            const Extra& extra = {}, std::initializer_list<CheckpointPart> parts = {}) const {
    write(detail::held_module(module, "Checkpoint"), optimizer, step, extra,
          {parts.begin(), parts.size()});
  }
  /// Writes parts of the run besides, in this order: `save(net, optimizer, step, {schedule,
  /// scaler})`, also after what else belongs to the run. Throws Mismatch, on all ranks, if they
  /// give other ones.
  template <detail::HoldsModule Held>
  void save(const Held& module, torch::optim::Optimizer& optimizer, std::int64_t step,
            std::initializer_list<CheckpointPart> parts) const {
    save(module, optimizer, step, {}, parts);
  }
  /// Fills both, in place, on all ranks, and returns the step. The first rank reads the file, so
  /// that those of the others, on disks of their own, do not matter. Nothing is changed on any rank
  /// unless module and optimizer fit the file on all: also the order of the optimizer's parameters,
  /// as far as they are the module's. The state of an optimizer that overrides neither `save` nor
  /// `load` can be read only where it has a state already, of which LibTorch can make copies. It
  /// fills the parts too: those that `save` was given, of the same types and in the same order;
  /// CheckpointError on all ranks for others. A file that has parts can be loaded without any. If
  /// one cannot be filled, none is changed, nor anything else.
  template <detail::HoldsModule Held>
  std::int64_t load(Held&& module, torch::optim::Optimizer& optimizer,
                    std::initializer_list<CheckpointPart> parts = {}) const {
    Extra extra;
    return load(module, optimizer, extra, parts);
  }
  /// Does the same, with what else belongs to the run.
  template <detail::HoldsModule Held>
  std::int64_t load(Held&& module, torch::optim::Optimizer& optimizer, Extra& extra,
                    std::initializer_list<CheckpointPart> parts = {}) const {
    return read(detail::held_module(module, "Checkpoint"), optimizer, extra,
                {parts.begin(), parts.size()});
  }

  /// Returns only the extra state, for a look at it before anything is changed.
  [[nodiscard]] Extra read_extra() const;
  /// Returns whether the first rank finds the file.
  [[nodiscard]] bool exists() const;
  /// Returns the file's path; local.
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  using Parts = std::span<const CheckpointPart>;
  void write(const torch::nn::Module& module, torch::optim::Optimizer& given, std::int64_t step,
             const Extra& extra, Parts parts) const;
  std::int64_t read(torch::nn::Module& module, torch::optim::Optimizer& given, Extra& extra,
                    Parts parts) const;
  struct Contents;
  void find_contents(const std::string& outline, torch::nn::Module& module,
                     const detail::OptimizerLoad& load, Contents& contents) const;
  static void read_contents(torch::nn::Module& module, Parts parts, Contents& contents);
  [[nodiscard]] std::string open(std::unique_ptr<detail::CheckpointFile>& file,
                                 bool all_at_once) const;
  void fill_own(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, Parts parts,
                const Contents& contents) const;
  void agree(const std::string& failure) const;
  void check_alike(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                   std::int64_t step, Parts parts) const;
  [[nodiscard]] std::vector<at::Tensor> memory_of_rank(torch::optim::Optimizer& optimizer,
                                                       Parts parts) const;

  std::string path_;
  CheckpointOptions options_;
};

}  // namespace hvd
#pragma GCC visibility pop
