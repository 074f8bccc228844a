#pragma once
/// The fp32 masters of an optimizer's 16-bit parameters, behind a MasterWeights
/// (torch_bindings/optimizer/master_weights.h). While the optimizer steps, its groups hold the
/// masters, whose gradients are the parameters' in fp32; the state that it keeps is theirs.
/// Afterwards the parameters are the masters, rounded. A master is made when its parameter has a
/// gradient for the first time. What is written to a parameter otherwise (a broadcast, a
/// checkpoint, weight clipping) is taken over by the master, element by element: those that still
/// are the master's, rounded, keep their fp32 value. Where `to()` gives a parameter another type,
/// the next step goes on with its state, and, where it is a 16-bit one no longer, with the values
/// of its master. Loss scaling and clipping apply to the fp32 gradients, which are there only while
/// the optimizer steps: what they multiply by is noted. Thread: the optimizer's. Owns the masters;
/// refers to the optimizer. Errors: InvalidArgument for gradients that were changed after loss
/// scaling or clipping, for an optimizer that was stepped by itself, and for a state that is not
/// LibTorch's and would have to be in fp32.
// Tested in tests/torch_bindings/optimizer/master_weights_test.cc

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_bindings/gradients/gradient_mark.h"

namespace hvd::detail {

/// The master of a 16-bit parameter, or of a run of its elements.
class MasterCopy {
 public:
  /// Returns whether a parameter like this one has a master.
  [[nodiscard]] static bool is_for(const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
  }
  /// The elements [begin, end) in the order of memory; end < 0: the parameter as it is. `whole`:
  /// the master of all of it, if there is one.
  explicit MasterCopy(at::Tensor parameter, const at::Tensor& whole = {}, std::int64_t begin = 0,
                      std::int64_t end = -1);

  [[nodiscard]] const at::Tensor& tensor() const { return master_; }
  /// Takes over what has been written to the parameter since `write()`: what is not the master,
  /// rounded. By value, as LibTorch counts no write through `.data()`: on the host it costs one
  /// pass over both.
  void follow();
  /// Writes the master, rounded, to the parameter.
  void write();
  /// The master becomes what is in `whole`, in place.
  void load(const at::Tensor& whole);

 private:
  [[nodiscard]] at::Tensor weights() const;
  [[nodiscard]] at::Tensor part_of(const at::Tensor& whole) const;

  at::Tensor parameter_;
  std::int64_t begin_, end_;
  at::ScalarType type_;  ///< of the parameter, when it was last the master, rounded
  at::Tensor master_;
};

class MasterCopies {
 public:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;
  using Masters = std::unordered_map<const void*, at::Tensor>;  ///< by parameter

  /// Takes the state that the optimizer has already to fp32.
  explicit MasterCopies(torch::optim::Optimizer& optimizer);
  /// Leaves the optimizer as one of 16-bit parameters, with its state rounded.
  ~MasterCopies();
  MasterCopies(const MasterCopies&) = delete;
  MasterCopies& operator=(const MasterCopies&) = delete;

  /// The masters that the groups hold.
  enum class Lent : std::uint8_t {
    WithGradient,  ///< of parameters that have a gradient now, or had one
    OfAll,         ///< of all, also if they have no gradient yet: a closure will give them
    AsTheyAre,     ///< those that there are, without gradients
  };
  /// Puts the masters into the groups. `take_back` ends that, and writes the parameters unless they
  /// were lent as they are. Each does nothing where it is so already.
  void lend(Lent which);
  void take_back();

  /// Notes that a 16-bit parameter's gradient is multiplied by this, in fp32, after what was noted.
  void multiply(const at::Tensor& parameter, double factor);
  /// Notes that its elements are brought to the nearest ones from -bound to bound, in fp32, after
  /// what was noted before.
  void clamp(const at::Tensor& parameter, double bound);
  /// Returns `part`, of the gradient of `parameter` or all of it, in fp32 and changed as was noted.
  [[nodiscard]] at::Tensor wide(const at::Tensor& parameter, const at::Tensor& part) const;
  /// The gradients have been used, or thrown away.
  void forget_factors() { factors_.clear(); }

  /// Gives the masters away, and the optimizer's state of them to the parameters, in fp32.
  [[nodiscard]] Masters release();
  /// Takes such masters, and makes states of 16-bit parameters those of their masters.
  void adopt(const Masters& masters);
  /// Returns what brings masters and states back to what they are now, and leaves none.
  [[nodiscard]] std::function<void()> set_aside();
  [[nodiscard]] Masters masters() const;
  /// Returns the master that any MasterCopies has of this parameter, which has taken over what was
  /// written to it; undefined if none has.
  [[nodiscard]] static at::Tensor master_of(const at::Tensor& parameter);

  /// Writes the masters, each under its place in the groups.
  static void write(torch::serialize::OutputArchive& archive,
                    const torch::optim::Optimizer& optimizer, const Masters& masters);
  /// Returns what `write` wrote, or nothing. Throws InvalidArgument for one of another shape.
  [[nodiscard]] static Masters read(torch::serialize::InputArchive& archive,
                                    const torch::optim::Optimizer& optimizer);

 private:
  /// An infinite bound is none.
  struct Change {
    double factor = 1, bound = std::numeric_limits<double>::infinity();
  };
  struct Factors {
    std::vector<Change> factors;
    GradientMark gradient;
  };
  void note(const at::Tensor& parameter, const Change& change);
  void end_masters_of_wide();
  void take_in_state_of(const at::Tensor& parameter);
  MasterCopy& copy_of(const at::Tensor& parameter, const at::Tensor& whole = {});
  void rekey(const void* from, const void* to, at::ScalarType type);

  torch::optim::Optimizer& optimizer_;
  std::unordered_map<const void*, std::pair<at::Tensor, MasterCopy>>
      copies_;                                        ///< by parameter, which is held
  std::unordered_map<const void*, Factors> factors_;  ///< by parameter
  std::vector<std::vector<at::Tensor>> groups_;       ///< while they are lent: the parameters
  bool lent_ = false;
  bool writes_ = false;
};

}  // namespace hvd::detail
