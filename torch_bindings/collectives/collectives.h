#pragma once
/// This file has the collectives on at::Tensor. They take any dense or strided CPU or CUDA tensor
/// of a DataType; the result is contiguous. Plain forms return a new tensor and are differentiable;
/// forms with a trailing `_` change their argument; `_async` forms return at once, and the argument
/// must not be changed or read before `wait()`. Any thread may call them. What they mean:
/// docs/semantics.md.
///
/// Forms in place are changes for autograd: where backward still needs what was in the tensor, it
/// says so (c10::Error). With grad mode on, gradients of what such a form has changed pass the
/// collective as those of the plain form do; leaves, as parameters are, and views of them are
/// changed as data are under NoGradGuard. Members of a group may share memory.
///
/// They refuse at the call, on that rank (InvalidArgument,
/// DuplicateName), naming the tensor: undefined and sparse tensors, other types and devices; in
/// place, what has elements that share memory (expand) and, where a gradient is required, one of
/// several views that one operation made (split) and members of a group that overlap. `wait()`
/// throws Mismatch, RankFailed, Shutdown, BackendError.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "hvd/hvd.h"

#pragma GCC visibility push(default)
namespace hvd {

/// @{
/// Combines the tensors of all ranks element by element; shapes and types must be equal. The
/// gradient is the same allreduce of the gradient. Compression int8, topk, powersgd: Average
/// and Sum of floating point, by an allgather; nothing is remembered of what is left out, and it
/// is named and numbered as an allgather. Anything else travels as it is.
at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options = {});
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options = {});
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options = {});
/// @}

/// @{
/// Combines several tensors, all or nothing: they become ready together, travel together and fail
/// together. All must be on one device.
std::vector<at::Tensor> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                          const AllreduceOptions& options = {});
std::vector<at::Tensor> grouped_allreduce_(std::vector<at::Tensor> tensors,
                                           const AllreduceOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allreduce_async(const std::vector<at::Tensor>& tensors,
                                                        const AllreduceOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allreduce_async_(std::vector<at::Tensor> tensors,
                                                         const AllreduceOptions& options = {});
/// @}

/// @{
/// Concatenates the tensors of all ranks along dimension 0, which may differ between ranks and be
/// 0; the others must be equal. The gradient is the average of the ranks' gradients, cut to this
/// rank's rows.
at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options = {});
Handle<at::Tensor> allgather_async(const at::Tensor& tensor, const AllgatherOptions& options = {});
std::vector<at::Tensor> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                          const AllgatherOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_allgather_async(const std::vector<at::Tensor>& tensors,
                                                        const AllgatherOptions& options = {});
// In braces, so that empty ones are of tensors, and not of buffers.
inline std::vector<at::Tensor> grouped_allgather(std::initializer_list<at::Tensor> tensors,
                                                 const AllgatherOptions& options = {}) {
  return grouped_allgather(std::vector<at::Tensor>(tensors), options);
}
inline Handle<std::vector<at::Tensor>> grouped_allgather_async(
    std::initializer_list<at::Tensor> tensors, const AllgatherOptions& options = {}) {
  return grouped_allgather_async(std::vector<at::Tensor>(tensors), options);
}
/// @}

/// @{
/// Gives every rank the root's tensor; shapes and types must be equal. The gradient is the average
/// of the ranks' gradients on the root, and zero elsewhere.
at::Tensor broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {});
at::Tensor broadcast_(at::Tensor tensor, const BroadcastOptions& options = {});
Handle<at::Tensor> broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {});
Handle<at::Tensor> broadcast_async_(at::Tensor tensor, const BroadcastOptions& options = {});
/// @}

/// @{
/// Averages or sums the tensors of all ranks and returns this rank's rows of the result: the first
/// `dim0 % size` ranks of the set get one row more than the others, or each as many elements as
/// `counts` says. The gradient is the ranks' gradients concatenated, times the number of ranks for
/// Sum, times the scales.
at::Tensor reducescatter(const at::Tensor& tensor, const ReducescatterOptions& options = {});
Handle<at::Tensor> reducescatter_async(const at::Tensor& tensor,
                                       const ReducescatterOptions& options = {});
std::vector<at::Tensor> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                              const ReducescatterOptions& options = {});
Handle<std::vector<at::Tensor>> grouped_reducescatter_async(
    const std::vector<at::Tensor>& tensors, const ReducescatterOptions& options = {});
inline std::vector<at::Tensor> grouped_reducescatter(std::initializer_list<at::Tensor> tensors,
                                                     const ReducescatterOptions& options = {}) {
  return grouped_reducescatter(std::vector<at::Tensor>(tensors), options);
}
inline Handle<std::vector<at::Tensor>> grouped_reducescatter_async(
    std::initializer_list<at::Tensor> tensors, const ReducescatterOptions& options = {}) {
  return grouped_reducescatter_async(std::vector<at::Tensor>(tensors), options);
}
/// @}

/// AlltoallOptions are those of alltoall.
struct AlltoallOptions {
  std::string name{};                  ///< see AllreduceOptions::name
  std::optional<at::Tensor> splits{};  ///< 1-D, int32 or int64, on any device: rows for each rank;
                                       ///< none: dimension 0 is divided evenly
  ProcessSet process_set{};            ///< the ranks that take part
  std::chrono::nanoseconds deadline{0};  ///< see AllreduceOptions::deadline
  World world{};                         ///< see AllreduceOptions::world
};
/// The options of operations on tensors.
template <>
struct OptionsOf<at::Tensor> : OptionsOf<Buffer> {
  using Alltoall = AlltoallOptions;  ///< those of alltoall
};
/// The same of several tensors.
template <>
struct OptionsOf<std::vector<at::Tensor>> : OptionsOf<at::Tensor> {};
/// An AlltoallResult is what an alltoall brought this rank: the rows, and how many came from each
/// rank of the set, as int32 on the device of the splits, on the CPU if there were none.
struct AlltoallResult {
  /// @{
  /// Shapes: [rows, ...] and [size of the set].
  at::Tensor output, received_splits;
  /// @}
};
/// @{
/// Sends each rank of the set its rows, in the order of the ranks, and concatenates what comes.
/// Rows beyond the splits' sum are not sent (and get a gradient of zero). The gradient goes back
/// the way the rows came.
AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options = {});
Handle<AlltoallResult> alltoall_async(const at::Tensor& tensor,
                                      const AlltoallOptions& options = {});
/// @}

/// @{
/// Do what allgather, alltoall and reducescatter do, and write the result to `output`, which they
/// return: a CPU or CUDA tensor of the input's type, device and dimensions beyond the first,
/// contiguous or not, with as many rows as come. What cannot fit is refused at the call; where some
/// rank's output has more or fewer rows than come, all ranks get Mismatch at `wait()`, and nothing
/// is written. Output and input may share memory; the input is copied first then. Writing counts as
/// a change of `output` for autograd. Where grad mode is on, gradients of it go to `input` as those
/// of the plain form do, and a leaf that requires a gradient, or a view of one, is refused as
/// `output`.
at::Tensor allgather_into(at::Tensor output, const at::Tensor& input,
                          const AllgatherOptions& options = {});
Handle<at::Tensor> allgather_into_async(at::Tensor output, const at::Tensor& input,
                                        const AllgatherOptions& options = {});
AlltoallResult alltoall_into(at::Tensor output, const at::Tensor& input,
                             const AlltoallOptions& options = {});
Handle<AlltoallResult> alltoall_into_async(at::Tensor output, const at::Tensor& input,
                                           const AlltoallOptions& options = {});
at::Tensor reducescatter_into(at::Tensor output, const at::Tensor& input,
                              const ReducescatterOptions& options = {});
Handle<at::Tensor> reducescatter_into_async(at::Tensor output, const at::Tensor& input,
                                            const ReducescatterOptions& options = {});
/// @}

/// @{
/// Describe an operation once, to be started again and again on the same tensors (see
/// PersistentHandle): allreduce and broadcast in place, the others into memory that exists, as the
/// `_into` forms do. The tensors' memory, shape and strides stay, also from their side; splits are
/// read once. Each `start()` is what the `_async` form is, for autograd as well: it counts as a
/// change, and takes grad mode as it is then. The tensors are kept alive.
PersistentHandle<at::Tensor> allreduce_init(at::Tensor tensor,
                                            const AllreduceOptions& options = {});
PersistentHandle<at::Tensor> broadcast_init(at::Tensor tensor,
                                            const BroadcastOptions& options = {});
PersistentHandle<at::Tensor> allgather_init(at::Tensor output, const at::Tensor& input,
                                            const AllgatherOptions& options = {});
PersistentHandle<AlltoallResult> alltoall_init(at::Tensor output, const at::Tensor& input,
                                               const AlltoallOptions& options = {});
PersistentHandle<at::Tensor> reducescatter_init(at::Tensor output, const at::Tensor& input,
                                                const ReducescatterOptions& options = {});
/// @}
/// @{
/// Do the same, and make the output, which `wait()` returns: for as many rows of each rank as this
/// one gives it. Where some rank gives others, it is the Mismatch of memory that does not fit.
/// alltoall_init throws InvalidArgument where there are splits.
PersistentHandle<at::Tensor> allgather_init(const at::Tensor& input,
                                            const AllgatherOptions& options = {});
PersistentHandle<AlltoallResult> alltoall_init(const at::Tensor& input,
                                               const AlltoallOptions& options = {});
PersistentHandle<at::Tensor> reducescatter_init(const at::Tensor& input,
                                                const ReducescatterOptions& options = {});
/// @}

/// @{
/// Averages or sums sparse COO tensors of one size, whose entries may be anywhere; the result is
/// sparse and coalesced. Travels as an allgather of indices and values, and without a name is
/// numbered as one. Not differentiable.
at::Tensor sparse_allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
Handle<at::Tensor> sparse_allreduce_async(const at::Tensor& tensor,
                                          const AllreduceOptions& options = {});
/// @}

/// @{
/// Sends a tensor to one rank, and receives one that a rank has sent into `tensor`, which must have
/// its type and number of elements; returns the rank that it came from. Contiguous or not, on the
/// host; a GPU's travel through the host. Errors as those of the forms on buffers (hvd/hvd.h). A
/// recv counts as a change for autograd, and no gradient passes. What comes is in `tensor` when
/// `wait()` has returned.
void send(const at::Tensor& tensor, const PeerOptions& options);
Handle<void> send_async(const at::Tensor& tensor, const PeerOptions& options);
int recv(at::Tensor tensor, const PeerOptions& options = {});
Handle<int> recv_async(at::Tensor tensor, const PeerOptions& options = {});
/// @}

namespace detail {
/// In place on many tensors as one group, whatever their types. `names`: what messages call them.
Handle<std::vector<at::Tensor>> grouped_broadcast_async_(std::vector<at::Tensor> tensors,
                                                         std::vector<std::string> names,
                                                         const BroadcastOptions& options);
}  // namespace detail

}  // namespace hvd
#pragma GCC visibility pop
