#pragma once
/// Lets a part of the forward pass decide what becomes of the tensors that autograd saves for
/// backward: LibTorch asks its engine for hooks whenever a node saves a tensor, and has such hooks
/// for Python alone. Here an engine stands before LibTorch's, which gives the hooks of this
/// thread's innermost scope and passes everything else on. Thread: a scope belongs to the thread
/// that made it. Owns nothing. Throws nothing of its own.
// Tested in tests/torch_bindings/modules/activation_checkpoint_test.cc

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace hvd::detail {

/// One that takes what autograd saves.
class SavedTensorTaker {
 public:
  SavedTensorTaker() = default;
  SavedTensorTaker(const SavedTensorTaker&) = delete;
  SavedTensorTaker& operator=(const SavedTensorTaker&) = delete;
  virtual ~SavedTensorTaker() = default;
  /// Returns what is to take the next tensor.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

/// While it lives, `taker` takes what this thread's operations save; null: it is saved as ever.
class [[nodiscard]] SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorTaker* taker);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensorTaker* const before_;
};

}  // namespace hvd::detail
