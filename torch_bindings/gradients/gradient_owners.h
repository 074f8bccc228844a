#pragma once
/// The table of who reduces the gradients of which parameters in this process, and on which process
/// set: for wrappers, of which two kinds around one parameter would reduce its gradient twice, and
/// for those who see an optimizer only (GradScaler). One table; any thread; one mutex. Errors:
/// InvalidArgument, naming the parameter, from `refuse_others` alone.
// Tested in tests/torch_bindings/modules/distributed_data_parallel_test.cc

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {

/// One that reduces gradients, in the table as long as it lives or until `end()`.
class GradientOwner {
 public:
  /// `kind`: "optimizer" or "ddp".
  GradientOwner(const ProcessSet& process_set, std::string kind)
      : process_set_(process_set), kind_(std::move(kind)) {}
  ~GradientOwner() { end(); }
  GradientOwner(const GradientOwner&) = delete;
  GradientOwner& operator=(const GradientOwner&) = delete;
  /// Holds the parameter, so that its address is not given to another.
  void add(const at::Tensor& parameter);
  void end() noexcept;
  [[nodiscard]] const std::string& kind() const { return kind_; }

 private:
  const ProcessSet process_set_;
  const std::string kind_;
  std::vector<at::Tensor> parameters_;
};

struct GradientOwners {
  /// Returns the sets on which gradients of these parameters are reduced, each once; none if nobody
  /// reduces any.
  static std::vector<ProcessSet> sets_of(const std::vector<at::Tensor>& parameters);
  /// Returns whether an owner of another kind reduces the gradient of `parameter`.
  static bool has_other(const std::string& kind, const at::Tensor& parameter);
  /// Returns how many reduce the gradient of `parameter`.
  static std::size_t count(const at::Tensor& parameter);
  /// Throws InvalidArgument if an owner of another kind reduces the gradient of one of these: one
  /// backward pass would reduce it twice.
  static void refuse_others(const std::string& kind,
                            const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                            std::size_t first = 0);
};

}  // namespace hvd::detail
