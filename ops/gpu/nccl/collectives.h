#pragma once
/// These functions put one batch on the stream: pack, NCCL, unpack. They never wait for the device, and for other ranks only where NCCL
/// connects them at a communicator's first collectives. They are for the thread that has the turn, and fail with BackendError, which leaves
/// the stream half filled.
///
/// A single tensor goes from its input to its output without the fusion buffer, unless it has to travel in another type. Tensors
/// whose outputs lie in leased memory (lent_memory.h) as they would lie in the fusion buffer are reduced there, and packed there where
/// their inputs lie elsewhere. Whether they do is this rank's own affair: the other ranks' calls are the same.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc

#include <span>

#include "hvd/types.h"
#include "ops/gpu/nccl/pieces.h"
#include "ops/gpu/nccl/reduction_plan.h"

namespace hvd::gpu {

/// By the types, operations and factors of `plan_reduction`. With `levels`: each host's ranks sum a share each (ncclReduceScatter), the
/// ranks of the same place sum theirs across hosts, and each host's put the shares together (ncclAllGather), as Horovod's hierarchical
/// allreduce does. A rank alone copies.
void enqueue_allreduce(const LaunchContext& context, const Reduction& reduction, std::span<const Piece> pieces);
/// Bytes are moved as they are.
void enqueue_broadcast(const LaunchContext& context, DataType dtype, int root, std::span<const Piece> pieces);
/// Equal counts by ncclAllGather, others by one ncclBroadcast per rank; all pieces in one NCCL group, none through the fusion buffer.
void enqueue_allgather(const LaunchContext& context, DataType dtype, std::span<const Piece> pieces);
/// One ncclSend and one ncclRecv per piece and other rank where there is something to send, all in one NCCL group; a rank's own part is
/// copied. Nothing goes through the fusion buffer.
void enqueue_alltoall(const LaunchContext& context, DataType dtype, std::span<const Piece> pieces);
/// Through the fusion buffer, sorted by the rank that keeps them, and one ncclReduceScatter, for which all ranks' parts are made as long
/// as the longest (what fills them up nobody reads). Where that would add more than a quarter, as for fewer rows than ranks: one
/// ncclReduce per rank, in one group.
void enqueue_reducescatter(const LaunchContext& context, const Reduction& reduction, std::span<const Piece> pieces);

}  // namespace hvd::gpu
