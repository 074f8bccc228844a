#pragma once
/// Who reduces the gradients of which parameters, for those who see an optimizer only (GradScaler): a wrapper says for each parameter on
/// which process set it does, and what kind of wrapper it is, as long as it lives. Any thread; one mutex. Refuses nothing.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {

class ReducedOn {
 public:
  ReducedOn(const ProcessSet& process_set, std::string kind) : process_set_(process_set), kind_(std::move(kind)) {}
  ~ReducedOn();
  ReducedOn(const ReducedOn&) = delete;
  ReducedOn& operator=(const ReducedOn&) = delete;
  /// `parameter` must live as long as this.
  void add(const at::Tensor& parameter);

  /// Returns the sets on which gradients of these parameters are reduced, each once; none if nobody reduces any.
  static std::vector<ProcessSet> sets_of(const std::vector<at::Tensor>& parameters);
  /// Returns whether a wrapper of another kind reduces the gradient of `parameter`.
  static bool is_by_other_than(const std::string& kind, const at::Tensor& parameter);

 private:
  const ProcessSet process_set_;
  const std::string kind_;
  std::vector<const void*> parameters_;
};

}  // namespace hvd::detail
