#pragma once
/// Small operations that are waited for at once: the engine is asked first, without an Operation
/// (SmallCalls::try_run). Any thread; the call must not outlive the tensors. Functions say by
/// false, or by an undefined tensor, that the operation must be submitted.
// Tested in tests/torch_bindings/collectives/allreduce_test.cc,
// tests/torch_bindings/collectives/into_test.cc

#include <ATen/ops/empty.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "hvd/api/world.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/history.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

/// Returns whether the engine can work on the tensor as it is.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

template <class Options>
SmallCall small_call(OpKind kind, const at::Tensor& tensor, const Options& options) {
  SmallCall call = small_request(kind, options);
  call.dtype = data_type_of(tensor, name_of(kind), options.name);
  call.shape = {tensor.sizes().data(), tensor.sizes().size()};
  call.input = tensor.const_data_ptr();
  return call;
}

inline bool run_small(SmallCall& call, const at::Tensor& output) {
  call.output = output.mutable_data_ptr();
  return try_fast_path(call);
}

inline bool run_small_in_place(SmallCall& call, const at::Tensor& tensor) {
  if (!run_small(call, tensor)) return false;
  note_change(tensor);
  return true;
}

inline bool is_small(const at::Tensor& tensor, OpKind kind) {
  return routes::may_repeat(kind, static_cast<std::int64_t>(tensor.nbytes()));
}

/// Returns whether a result of its size is not worth memory of its own kind.
inline bool is_tiny(const at::Tensor& tensor) { return routes::is_at_slot(tensor.nbytes(), 1); }

inline bool may_run_small(const at::Tensor& tensor, const AllreduceOptions& options) {
  return is_plain(tensor) && is_small(tensor, OpKind::Allreduce) &&
         options.compression == Compression::none();
}

/// Runs a group in place. False if it must be submitted, also where tensors may share memory.
inline bool run_small_in_place(const std::vector<at::Tensor>& tensors,
                               const AllreduceOptions& options) {
  const std::size_t count = tensors.size();
  if (count < 2 || count > limit(Limit::GroupTensors)) return false;
  std::array<SmallTensor, limit(Limit::GroupTensors)> group;
  for (std::size_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!may_run_small(tensor, options) || tensor.scalar_type() != tensors[0].scalar_type() ||
        changes_history(tensor, name_of(OpKind::Allreduce), options.name))
      return false;
    for (std::size_t other = 0; other < i; ++other)
      if (tensor.is_alias_of(tensors[other])) return false;
    void* const memory = tensor.mutable_data_ptr();
    group[i] = {memory, memory, {tensor.sizes().data(), tensor.sizes().size()}};
  }
  SmallCall call = small_call(OpKind::Allreduce, tensors[0], options);
  call.group = std::span(group).first(count);
  if (!try_fast_path(call)) return false;
  for (const at::Tensor& tensor : tensors) note_change(tensor);
  return true;
}

/// Allocates results whose number of rows the engine knows.
struct SmallRows {
  const at::Tensor& input;
  at::Tensor result;
  std::shared_ptr<ResultPool> pool;  ///< null for what is small
  static void* allocate(void* context, std::int64_t rows) {
    auto& self = *static_cast<SmallRows*>(context);
    auto sizes = self.input.sizes().vec();
    sizes.front() = rows;
    self.result = empty_result(sizes, self.input.options().requires_grad(false), self.pool.get());
    return self.result.mutable_data_ptr();
  }
};

/// Returns the result; undefined if the operation must be submitted. `splits`, `received`: of an
/// alltoall, rows for each rank and from each.
template <class Options>
at::Tensor run_by_rows(OpKind kind, const at::Tensor& tensor, const Options& options,
                       std::span<const std::int64_t> splits = {},
                       std::span<std::int64_t> received = {}) {
  if (!is_plain(tensor) || !is_small(tensor, kind) || tensor.dim() == 0 || needs_gradient({tensor}))
    return {};
  SmallCall call = small_call(kind, tensor, options);
  call.splits = splits;
  call.received = received;
  SmallRows rows{tensor, {}, is_tiny(tensor) ? nullptr : result_pool()};
  call.allocate = &SmallRows::allocate;
  call.context = &rows;
  return try_fast_path(call) ? rows.result : at::Tensor();
}

}  // namespace hvd::detail
