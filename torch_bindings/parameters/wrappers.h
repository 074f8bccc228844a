#pragma once
/// The table of which optimizer is around which in this process: DistributedOptimizers and
/// MasterWeights around those of the user. In C++ both stay in scope, so that a call may be given
/// either; this finds the one that is meant. One table; any thread; one mutex. Owns nothing.
// Tested in tests/torch_bindings/optimizer/one_name_test.cc

#include <torch/optim/optimizer.h>

namespace hvd::detail {

struct Wrappers {
  /// Note that `wrapper` is around `wrapped` from now on, or no longer.
  static void add(const torch::optim::Optimizer& wrapped, torch::optim::Optimizer& wrapper);
  static void remove(const torch::optim::Optimizer& wrapper) noexcept;
  static void move(const torch::optim::Optimizer& from, torch::optim::Optimizer& to) noexcept;
  /// Returns `optimizer` if it is of that type, else the first of that type that is around it; null
  /// if there is none.
  template <class Wrapper>
  static Wrapper* around(torch::optim::Optimizer& optimizer) {
    if (auto* const itself = dynamic_cast<Wrapper*>(&optimizer)) return itself;
    for (std::size_t i = 0;; ++i) {
      torch::optim::Optimizer* const wrapper = around(optimizer, i);
      if (wrapper == nullptr) return nullptr;
      if (auto* const found = dynamic_cast<Wrapper*>(wrapper)) return found;
    }
  }
  /// Returns the optimizer that trains what `optimizer` does: the outermost one around it, or
  /// itself. Throws InvalidArgument, naming `call`, where there are several.
  static torch::optim::Optimizer& outermost(torch::optim::Optimizer& optimizer, const char* call);

 private:
  static torch::optim::Optimizer* around(const torch::optim::Optimizer& wrapped,
                                         std::size_t number);
};

}  // namespace hvd::detail
