#pragma once
/// The buffers of a module (running statistics, counters, masks) made those of one rank on all, in
/// place. They go by their names. Small ones and running statistics travel each time, as one tensor
/// per type; large ones only where a rank has changed them since they were equal, as their version
/// counters and addresses say: all ranks tell one another which. Autograd is told where values
/// change, and refuses a graph that needs those before; not of running statistics, as batch
/// normalisation's own kernels do not tell it: so forward may be called several times before
/// backward. Thread: one at a time. Shares the module. Throws what a broadcast does:
/// Mismatch on all ranks, naming the buffers, where the ranks' buffers differ in name, type or
/// shape.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {
class JoinRounds;
}  // namespace hvd::detail

#pragma GCC visibility push(default)
namespace hvd::detail {

/// The buffers of one module.
class SharedBuffers {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  SharedBuffers(std::shared_ptr<torch::nn::Module> module, std::string name, ProcessSet process_set)
      : module_(std::move(module)), name_(std::move(name)), process_set_(std::move(process_set)) {}

  /// The sharing that is under way, until finish().
  class Sharing;
  /// Collective. Makes all buffers the first rank's, or with `rounds` those of the first rank that
  /// still trains.
  void share(const JoinRounds* rounds);
  /// The same in two halves, to do something else in between; without rounds.
  [[nodiscard]] std::shared_ptr<Sharing> start();
  void finish(Sharing& sharing);
  /// Says that all ranks have just got the same, by something else.
  void are_equal();
  /// Returns the buffers that did not travel when they were shared last, by name, in the same order
  /// on all ranks: what nobody is known to have changed since all ranks had the same. Without a
  /// guard, what has changed them past their version counters stays.
  [[nodiscard]] const Named& kept() const { return kept_; }

 private:
  /// A buffer, as it was when it was the same on all ranks.
  struct Seen {
    at::Tensor buffer;  ///< so that its address is not another's
    std::int64_t version = 0;
    const void* memory = nullptr;
  };
  void are_equal(const Named& buffers);
  [[nodiscard]] bool is_changed(const at::Tensor& buffer) const;
  [[nodiscard]] Handle<at::Tensor> tell(const std::vector<std::uint8_t>& changed) const;
  void sum_of_training(const std::vector<at::Tensor>& tensors, const std::string& name,
                       bool is_root) const;
  void share_what_has_changed(Sharing& sharing, const JoinRounds* rounds, bool is_root);
  void tell_differences(const Sharing& sharing) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::string name_;
  const ProcessSet process_set_;
  std::unordered_map<const void*, Seen> seen_;
  Named kept_;
};

}  // namespace hvd::detail
#pragma GCC visibility pop
