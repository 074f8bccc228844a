#include "torch_bindings/collectives/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hvd/api/result_pool.h"
#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/hvd.h"

namespace hvd::detail {

namespace {
constexpr std::array<std::pair<at::ScalarType, DataType>, kDataTypes> kTypes{
    {{at::kByte, DataType::UInt8},
     {at::kChar, DataType::Int8},
     {at::kShort, DataType::Int16},
     {at::kInt, DataType::Int32},
     {at::kLong, DataType::Int64},
     {at::kHalf, DataType::Float16},
     {at::kBFloat16, DataType::BFloat16},
     {at::kFloat, DataType::Float32},
     {at::kDouble, DataType::Float64},
     {at::kBool, DataType::Bool},
     {at::kComplexFloat, DataType::Complex64},
     {at::kComplexDouble, DataType::Complex128}}};

/// A tensor in `block`, as one is that LibTorch has allocated: its storage may be resized, and is
/// as long as the tensor.
at::Tensor tensor_in(std::shared_ptr<void> block, std::size_t bytes, at::IntArrayRef sizes,
                     at::IntArrayRef strides, const at::TensorOptions& options) {
  void* const data = block.get();
  auto* const owner = new std::shared_ptr<void>(std::move(block));
  c10::DataPtr memory(
      data, owner, [](void* held) { delete static_cast<std::shared_ptr<void>*>(held); }, at::kCPU);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                             bytes, std::move(memory),
                                                             c10::GetAllocator(at::kCPU), true));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

std::size_t bytes_of(std::int64_t elements, const at::TensorOptions& options) {
  return static_cast<std::size_t>(elements) *
         at::elementSize(at::typeMetaToScalarType(options.dtype()));
}

at::Tensor shared_or_null(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t elements,
                          const at::TensorOptions& options) {
  if (!options.device().is_cpu() || elements == 0) return {};
  const std::size_t bytes = bytes_of(elements, options);
  auto block = allocate_shared(bytes);
  return block ? tensor_in(std::move(block), bytes, sizes, strides, options) : at::Tensor();
}
}  // namespace

bool is_carried(at::ScalarType type) {
  return std::any_of(kTypes.begin(), kTypes.end(),
                     [&](const auto& both) { return both.first == type; });
}

DataType data_type_of(const at::Tensor& tensor, std::string_view what, std::string_view name) {
  for (const auto& [theirs, ours] : kTypes)
    if (theirs == tensor.scalar_type()) return ours;
  require_running();
  const std::string of = name.empty() ? std::string() : formatted(" '{}'", name);
  throw InvalidArgument(formatted("{}{}: tensors of type {} are not supported", what, of,
                                  at::toString(tensor.scalar_type())));
}

at::ScalarType scalar_type_of(DataType dtype) {
  for (const auto& [theirs, ours] : kTypes)
    if (ours == dtype) return theirs;
  throw InvalidArgument("unknown data type");
}

Device device_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {};
  if (tensor.is_cuda()) return {DeviceKind::Cuda, tensor.get_device()};
  throw InvalidArgument(formatted("tensors on {} are not supported", tensor.device().str()));
}

Shape shape_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor shared =
      shared_or_null(sizes, c10::contiguous_strides(sizes), c10::multiply_integers(sizes), options);
  return shared.defined() ? shared : at::empty(sizes, options);
}

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options, ResultPool* pool) {
  if (pool == nullptr || !options.device().is_cpu()) return at::empty(sizes, options);
  const std::size_t bytes = bytes_of(c10::multiply_integers(sizes), options);
  auto block = pool->allocate(bytes);
  if (!block) return at::empty(sizes, options);
  return tensor_in(std::move(block), bytes, sizes, c10::contiguous_strides(sizes), options);
}

at::Tensor empty_shared_like(const at::Tensor& like) {
  const auto options = like.options().requires_grad(false);
  at::Tensor shared = shared_or_null(like.sizes(), like.strides(), like.numel(), options);
  return shared.defined() ? shared : at::empty_strided(like.sizes(), like.strides(), options);
}

TensorArgument argument(const at::Tensor& input, const at::Tensor& output, std::string_view what) {
  TensorArgument argument;
  argument.input = input.const_data_ptr();
  argument.output = output.defined() ? output.mutable_data_ptr() : nullptr;
  argument.dtype = data_type_of(input, what);
  argument.shape = shape_of(input);
  return argument;
}

at::Tensor view_of(const std::shared_ptr<void>& memory, std::size_t offset, const at::Tensor& like,
                   at::ScalarType type) {
  auto* data = static_cast<std::byte*>(memory.get()) + offset;
  const auto options = like.options().requires_grad(false).dtype(type);
  const auto keep = [memory](void*) {};
  const auto strides = like.is_non_overlapping_and_dense() ? at::DimVector(like.strides())
                                                           : c10::contiguous_strides(like.sizes());
  return at::from_blob(data, like.sizes(), strides, keep, options, like.device());
}

std::int64_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return -1;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool has_memory_of_its_own(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.numel() > 0 &&
         tensor.is_non_overlapping_and_dense() && tensor.storage().use_count() == 1 &&
         tensor.storage().nbytes() == tensor.nbytes();
}

at::Tensor unexpanded(const at::Tensor& tensor) {
  at::Tensor part = tensor;
  if (tensor.layout() != at::kStrided) return part;
  // backwards, so that the strides of what is left are those of dense memory
  for (std::int64_t dim = part.dim() - 1; dim >= 0; --dim)
    if (part.stride(dim) == 0 && part.size(dim) > 1) part = part.select(dim, 0).unsqueeze(dim);
  return part;
}

at::Tensor carried(const at::Tensor& tensor) {
  const at::Tensor part = unexpanded(tensor);
  if (is_carried(part.scalar_type())) return part;
  switch (part.element_size()) {
    case 1: return part.view(at::kByte);
    case 2: return part.view(at::kShort);
    case 4: return part.view(at::kInt);
    case 8: return part.view(at::kLong);
    default: static_cast<void>(data_type_of(part, "")); return part;
  }
}

at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1});
}

at::Tensor bytes_in_memory_order(const at::Tensor& dense) {
  return in_memory_order(dense).view(at::kByte);
}

at::Tensor bytes_of_text(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu().contiguous();
  return {static_cast<const char*>(here.const_data_ptr()), here.nbytes()};
}

at::Tensor in_memory_order_of(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.is_sparse()) return in_memory_order_of(tensor.to_dense(), like);
  if (tensor.strides() == like.strides()) return in_memory_order(tensor);
  return in_memory_order(
      at::empty_strided(like.sizes(), like.strides(), tensor.options().requires_grad(false))
          .copy_(tensor));
}

}  // namespace hvd::detail
