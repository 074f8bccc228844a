#pragma once
/// The buffers of a module (running statistics, counters) made those of one rank on all, in place. They travel as one tensor per type.
/// Autograd is not told of the change, as batch normalisation's own kernels do not tell it: so forward may be called several times before
/// backward. Thread: one at a time. Shares the module. Throws what a broadcast does: Mismatch where the ranks' buffers differ in size.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {
class JoinRounds;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd::detail {

class SharedBuffers {
 public:
  SharedBuffers(std::shared_ptr<torch::nn::Module> module, std::string name, ProcessSet process_set)
      : module_(std::move(module)), name_(std::move(name)), process_set_(std::move(process_set)) {}

  /// What is under way, until finish().
  class Sharing;
  /// Collective. Makes all buffers the first rank's, or with `rounds` those of the first rank that still trains.
  void share(const JoinRounds* rounds) const;
  /// The same in two halves, to do something else in between; without rounds.
  [[nodiscard]] std::shared_ptr<Sharing> start() const;
  void finish(Sharing& sharing) const;

 private:
  void share_of_training(Sharing& sharing, const JoinRounds& rounds) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::string name_;
  const ProcessSet process_set_;
};

}  // namespace hvd::detail
#pragma GCC visibility pop
