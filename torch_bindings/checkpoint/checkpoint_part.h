#pragma once
/// A CheckpointPart is something of a training run that a Checkpoint saves and loads beside model
/// and optimizer, by reference: a scheduler, an ExponentialMovingAverage, an ElasticSampler, a
/// GradScaler, whatever has `save(OutputArchive&)` and `load(InputArchive&)`, and random number
/// generators of the user's own. The first rank's state is saved and all ranks get it, as these are
/// alike on all; but each rank has its own generators, and if as many ranks read the file, each has
/// its own of what an object's `of_rank()` returns (std::vector<at::Tensor>, alike in shapes and
/// types, filled in place; local, must not throw): averages of running statistics. Refers to the
/// object, which must outlive it; local, for the thread that saves and loads.
// Tested in tests/torch_bindings/checkpoint/checkpoint_run_test.cc

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <concepts>
#include <functional>
#include <string>
#include <typeinfo>
#include <vector>

#pragma GCC visibility push(default)
namespace hvd {

class GradScaler;

/// A type that can be a part as it is. No module and no optimizer: those belong to a Checkpoint of
/// their own, which knows of shards and ranks.
template <class T>
concept CheckpointState =
    !std::derived_from<T, torch::nn::Module> && !std::derived_from<T, torch::optim::Optimizer> &&
    requires(T & part, torch::serialize::OutputArchive& to, torch::serialize::InputArchive& from) {
  part.save(to);
  part.load(from);
};

/// A CheckpointPart is written where one is wanted: `checkpoint.save(net, optimizer, step,
/// {schedule, scaler, average})`.
class CheckpointPart {
 public:
  /// Refers to an object that saves and loads itself.
  template <CheckpointState T>
  CheckpointPart(T& part)  // NOLINT(google-explicit-constructor)
      : type_(name_of(typeid(part))),
        save_([&part](torch::serialize::OutputArchive& archive) { part.save(archive); }),
        load_([&part](torch::serialize::InputArchive& archive) { part.load(archive); }) {
    if constexpr (requires {
                    { part.of_rank() } -> std::convertible_to<std::vector<at::Tensor>>;
                  })
      of_rank_ = [&part] { return part.of_rank(); };
  }
  /// Refers to a scaler: its scale, factors, and steps since it grew.
  CheckpointPart(GradScaler& scaler);  // NOLINT(google-explicit-constructor)
  /// Refers to a generator, of which each rank has its own state. Ranks of which the file has none
  /// keep theirs.
  CheckpointPart(const at::Generator& generator);  // NOLINT(google-explicit-constructor)

  /// Returns the object's type, for messages and for the file.
  [[nodiscard]] const std::string& type() const { return type_; }
  /// Writes the object's state; not for a generator.
  void save(torch::serialize::OutputArchive& archive) const { save_(archive); }
  /// Reads what save() wrote; not for a generator.
  void load(torch::serialize::InputArchive& archive) const { load_(archive); }
  /// Returns what of the object's state belongs to this rank alone, in place; for most nothing.
  [[nodiscard]] std::vector<at::Tensor> of_rank() const {
    return of_rank_ ? of_rank_() : std::vector<at::Tensor>();
  }
  /// Returns the generator that this is; undefined for all others.
  [[nodiscard]] const at::Generator& generator() const { return generator_; }

 private:
  static std::string name_of(const std::type_info& type);

  std::string type_;
  std::function<void(torch::serialize::OutputArchive&)> save_;
  std::function<void(torch::serialize::InputArchive&)> load_;
  std::function<std::vector<at::Tensor>()> of_rank_;
  at::Generator generator_;
};

}  // namespace hvd
#pragma GCC visibility pop
