#include "torch_bindings/gradients/gradient_mark.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// A tensor like any other, but for `data()` (and what else detaches): LibTorch gives those a
/// counter of their own.
class WatchedImpl final : public c10::TensorImpl {
 public:
  WatchedImpl(const c10::TensorImpl& like, bool allow_tensor_metadata_change)
      : TensorImpl(c10::Storage(like.storage()), like.key_set(), like.dtype()) {
    copy_tensor_metadata(&like, this, like.version_counter(), allow_tensor_metadata_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& /*another*/, bool allow_tensor_metadata_change) const override {
    return c10::make_intrusive<WatchedImpl>(*this, allow_tensor_metadata_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& /*another*/, bool allow_tensor_metadata_change) const override {
    return c10::make_intrusive<WatchedImpl>(*this, allow_tensor_metadata_change);
  }
};

bool has_memory(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.has_storage();
}

}  // namespace

at::Tensor watched(const at::Tensor& gradient) {
  if (!has_memory(gradient) || gradient.is_inference() ||
      dynamic_cast<const WatchedImpl*>(gradient.unsafeGetTensorImpl()) != nullptr)
    return gradient;
  return at::Tensor(c10::make_intrusive<WatchedImpl>(*gradient.unsafeGetTensorImpl(), true));
}

void GradientMark::set(const at::Tensor& gradient) {
  storage_.reset();
  sparse_.reset();
  if (!gradient.defined()) return;
  if (has_memory(gradient)) {
    storage_ = gradient.storage().getWeakStorageImpl();
  } else {
    sparse_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
        gradient.getIntrusivePtr());
  }
  version_ = version_of(gradient);
}

GradientMark::Since GradientMark::since(const at::Tensor& gradient) const {
  if (!gradient.defined()) return Since::Dropped;
  const bool same = has_memory(gradient)
                        ? storage_.lock().get() == gradient.storage().unsafeGetStorageImpl()
                        : sparse_.lock().get() == gradient.unsafeGetTensorImpl();
  if (!same) return Since::Replaced;
  return version_of(gradient) == version_ ? Since::Same : Since::Changed;
}

}  // namespace hvd::detail
