#pragma once
/// Who reduces the gradients of which parameters, for those who see an optimizer only (GradScaler): a wrapper says for each parameter on
/// which process set it does, as long as it lives. Any thread; one mutex. Refuses nothing.

#include <ATen/core/Tensor.h>

#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {

class ReducedOn {
 public:
  explicit ReducedOn(const ProcessSet& process_set) : process_set_(process_set) {}
  ~ReducedOn();
  ReducedOn(const ReducedOn&) = delete;
  ReducedOn& operator=(const ReducedOn&) = delete;
  /// `parameter` must live as long as this.
  void add(const at::Tensor& parameter);

  /// Returns the sets on which gradients of these parameters are reduced, each once; none if nobody reduces any.
  static std::vector<ProcessSet> sets_of(const std::vector<at::Tensor>& parameters);

 private:
  const ProcessSet process_set_;
  std::vector<const void*> parameters_;
};

}  // namespace hvd::detail
