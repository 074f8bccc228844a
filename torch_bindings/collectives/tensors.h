#pragma once
/// Between at::Tensor and the core's buffers. Functions only; any thread.
// Tested in tests/torch_bindings/collectives/allreduce_test.cc,
// tests/torch_bindings/collectives/operation_test.cc

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "hvd/submission.h"
#include "hvd/types.h"

namespace hvd {
class ResultPool;
}  // namespace hvd

namespace hvd::detail {

/// Returns whether collectives carry tensors of that type.
bool is_carried(at::ScalarType type);
/// Throws InvalidArgument for a type that no collective carries, naming it, `what` and, if there is
/// one, the tensor's `name`.
DataType data_type_of(const at::Tensor& tensor, std::string_view what, std::string_view name = {});
at::ScalarType scalar_type_of(DataType dtype);
Device device_of(const at::Tensor& tensor);
Shape shape_of(const at::Tensor& tensor);

/// Returns how often the tensor has been written to, as autograd counts; -1 where it does not: an
/// undefined tensor, or one of inference mode.
std::int64_t version_of(const at::Tensor& tensor);

/// An uninitialised contiguous tensor where the ranks of the host can work on it in place; ordinary
/// memory where they share none, and on other devices.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options);
/// An uninitialised contiguous tensor for a result: where it is large and on the host, in memory of
/// earlier results. `pool` may be null.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options, ResultPool* pool);
/// Does what empty_shared does, with the strides of `like`, which must be dense and
/// non-overlapping.
at::Tensor empty_shared_like(const at::Tensor& like);

/// Returns whether nobody but the tensor, which is on the host and dense, refers to its memory, and
/// it has all of it: it may get other memory.
bool has_memory_of_its_own(const at::Tensor& tensor);

/// Returns the elements that there are of an expanded tensor, in the same memory: what may be
/// written in place. Returns any other as it is.
at::Tensor unexpanded(const at::Tensor& tensor);
/// Returns the same with bits as integers for a type that no collective has (unsigned 16 to 64
/// bits, float8...); throws as `data_type_of` does for one of another size than integers.
at::Tensor carried(const at::Tensor& tensor);
/// A tensor of `type` in `memory`, which it keeps, from byte `offset` on; with the shape of `like`,
/// and its strides if that is dense.
at::Tensor view_of(const std::shared_ptr<void>& memory, std::size_t offset, const at::Tensor& like,
                   at::ScalarType type);
/// The elements in the order of their memory; `dense` has no gaps.
at::Tensor in_memory_order(const at::Tensor& dense);
/// The bytes of these, in the same memory.
at::Tensor bytes_in_memory_order(const at::Tensor& dense);
/// Returns a text as a tensor of bytes, and back.
at::Tensor bytes_of_text(const std::string& text);
std::string text_of(const at::Tensor& bytes);
/// The elements of `tensor`, dense or sparse, in the order of the memory of `like`, which is dense
/// and of the same sizes.
at::Tensor in_memory_order_of(const at::Tensor& tensor, const at::Tensor& like);

/// `tensor` as an argument of a submission: it must be dense, and stays the caller's. `output` may
/// be undefined (allgather).
TensorArgument argument(const at::Tensor& input, const at::Tensor& output, std::string_view what);

}  // namespace hvd::detail
