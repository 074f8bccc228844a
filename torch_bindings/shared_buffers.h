#pragma once
/// The buffers of a module (running statistics, counters) made those of one rank on all, in place. Thread: one at a time. Shares the
/// module. Throws what a broadcast does: Mismatch where the ranks' buffers differ in number, type or shape.
/// Running statistics (`running_mean`, `running_var`) are written as the layers' own kernels do, which autograd does not notice: their
/// backward pass in training does not need them. So forward may be called several times before backward.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {

class JoinRounds;

class SharedBuffers {
 public:
  SharedBuffers(std::shared_ptr<torch::nn::Module> module, std::string name, ProcessSet process_set)
      : module_(std::move(module)), name_(std::move(name)), process_set_(std::move(process_set)) {}

  /// Empty where there is nothing to wait for.
  using Sharing = std::optional<Handle<std::vector<at::Tensor>>>;
  /// Collective. The first rank's, or with `rounds` those of the first rank that still trains.
  void share(const JoinRounds* rounds) const;
  /// Collective, when a backward pass ends. Returns what is under way. Graphs that are kept are not told of the change.
  [[nodiscard]] Sharing start(const JoinRounds* rounds) const;

 private:
  struct Buffers {
    std::vector<at::Tensor> tensors;
    std::vector<std::string> names;
  };
  [[nodiscard]] Buffers buffers(bool count_as_change) const;
  [[nodiscard]] Sharing start(Buffers buffers) const;
  void share_of_training(Buffers buffers, const JoinRounds& rounds) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::string name_;
  const ProcessSet process_set_;
};

}  // namespace hvd::detail
