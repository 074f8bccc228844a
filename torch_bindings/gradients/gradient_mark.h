#pragma once
/// Tells what has become of a gradient that is on its way: whether a user has changed it in place,
/// put another in its place, or dropped it since it was marked. Costs a look at a counter; what is
/// written past LibTorch, through a bare pointer, is not seen. Thread: one at a time. Owns nothing:
/// a mark keeps neither the gradient nor its memory.
// Tested in tests/torch_bindings/gradients/gradient_bucket_test.cc,
// tests/torch_bindings/what_if/what_if_clipping_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hvd::detail {

/// Returns a tensor in the memory of `gradient` whose `data()` counts changes together with it:
/// torch::nn::utils::clip_grad_norm_ writes through `grad().data()`, which for an ordinary tensor
/// counts by itself. Returns `gradient` if it is not dense.
at::Tensor watched(const at::Tensor& gradient);

class GradientMark {
 public:
  /// The fate of the gradient since it was marked.
  enum class Since : std::uint8_t {
    Same,
    Changed,   ///< in place
    Replaced,  ///< by a tensor in other memory
    Dropped,   ///< it is undefined now
  };
  void set(const at::Tensor& gradient);
  [[nodiscard]] Since since(const at::Tensor& gradient) const;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> sparse_{
      c10::intrusive_ptr<c10::TensorImpl,
                         c10::UndefinedTensorImpl>()};  ///< the gradient itself, which has no
                                                        ///< memory of its own
  std::int64_t version_ = 0;
};

}  // namespace hvd::detail
