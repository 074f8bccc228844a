#pragma once
/// Room card: the collectives on at::Tensor. Any dense or strided CPU or CUDA tensor of the types in SEMANTICS; the result is
/// contiguous. Plain forms return a new tensor and are differentiable; forms with a trailing `_` change their argument; `_async`
/// forms return at once, and the argument must not be changed or read before `wait()`.
/// Thread: any. Errors: InvalidArgument and DuplicateName at the call; Mismatch, RankFailed, Shutdown, BackendError at `wait()`.

#include <ATen/core/Tensor.h>

#include <vector>

#include "hvd/hvd.h"

namespace hvd {

// Combines the tensors of all ranks element by element; shapes and types must be equal. The gradient is the same allreduce of the
// gradient.
at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options = {});
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options = {});
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options = {});

// All or nothing: the tensors become ready together, travel together and fail together. All on one device.
std::vector<at::Tensor> grouped_allreduce(const std::vector<at::Tensor>& tensors, const AllreduceOptions& options = {});
std::vector<at::Tensor> grouped_allreduce_(std::vector<at::Tensor> tensors, const AllreduceOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allreduce_async(const std::vector<at::Tensor>& tensors, const AllreduceOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allreduce_async_(std::vector<at::Tensor> tensors, const AllreduceOptions& options = {});

// Concatenates the tensors of all ranks along dimension 0, which may differ between ranks and be 0; the others must be equal.
// The gradient is the average of the ranks' gradients, cut to this rank's rows.
at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options = {});
Handle<at::Tensor> allgather_async(const at::Tensor& tensor, const AllgatherOptions& options = {});
std::vector<at::Tensor> grouped_allgather(const std::vector<at::Tensor>& tensors, const AllgatherOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allgather_async(const std::vector<at::Tensor>& tensors, const AllgatherOptions& options = {});

// The root's tensor on every rank. The gradient is the average of the ranks' gradients on the root, and zero elsewhere.
at::Tensor broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {});
at::Tensor broadcast_(at::Tensor tensor, const BroadcastOptions& options = {});
Handle<at::Tensor> broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {});
Handle<at::Tensor> broadcast_async_(at::Tensor tensor, const BroadcastOptions& options = {});

namespace detail {
/// In place on many tensors as one group, whatever their types.
Handle<std::vector<at::Tensor>> grouped_broadcast_async_(std::vector<at::Tensor> tensors, const BroadcastOptions& options);
}  // namespace detail

}  // namespace hvd
