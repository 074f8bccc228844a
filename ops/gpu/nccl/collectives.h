#pragma once
/// These functions put one batch on the stream: pack, NCCL, unpack. They never wait for the device,
/// and for other ranks only where NCCL connects them at a communicator's first collectives. They
/// are for the thread that has the turn, and fail with BackendError, which leaves the stream half
/// filled.
///
/// A single tensor goes from its input to its output without the fusion buffer, unless it has to
/// travel in another type. Tensors whose outputs lie in lent memory (memory.h) as they would lie in
/// the fusion buffer are reduced there, and packed there where their inputs lie elsewhere. Whether
/// they do is this rank's own affair: the other ranks' calls are the same.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "hvd/types.h"
#include "ops/gpu/api/handles.h"
#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/memory.h"
#include "ops/gpu/nccl/reduction_plan.h"

namespace hvd::gpu {

/// Ranks that share a communicator.
struct CommGroup {
  std::shared_ptr<Communicator> communicator;
  int ranks = 1;
  int rank = 0;  ///< this one's in the communicator
};

/// A LaunchOrder keeps communicators that several streams use from being at work at once. NCCL
/// wants the work of all of a GPU's communicators in one order, the same on all ranks, and else may
/// hang (NCCL's guide, "Using multiple NCCL communicators concurrently"): that is the order of the
/// launches, and what NCCL does of a batch follows what it does of the batch before. Packing and
/// unpacking are not held up. NCCL's own way to it (NCCL_LAUNCH_ORDER_IMPLICIT, since 2.26) is the
/// whole process's, and so are its conditions, which a user's communicators in other threads need
/// not meet. For the thread that has the turn; fails with BackendError.
class LaunchOrder {
 public:
  /// Before the first of a batch's calls of NCCL's, and behind the last.
  void begin(const CallContext& site, const Stream& stream);
  void end(const CallContext& site, const Stream& stream);

 private:
  std::optional<Event> last_;
  const Stream* of_ = nullptr;
};

/// A LaunchContext says where a batch runs: on which ranks. It has no communicator where `levels`
/// has them, and for the allreduce of a set of one rank. Roots are ranks in the communicator.
struct LaunchContext : CommGroup {
  /// All hosts have the same number of ranks: those on this rank's host, and those of the same
  /// place on every host.
  struct Levels {
    CommGroup host, across;
  };

  CallContext site;
  const Stream& stream;
  FusionBuffer& fusion;
  const LentMemory& lent;
  LaunchOrder* order;  ///< null where there is one stream
  bool sums_only;      ///< NCCL scales nothing
  std::optional<Levels> levels;

  /// Makes the batch's calls of NCCL's.
  template <class Calls>
  void in_order(const Calls& calls) const {
    if (order != nullptr) order->begin(site, stream);
    calls();
    if (order != nullptr) order->end(site, stream);
  }

  [[nodiscard]] std::vector<std::shared_ptr<Communicator>> communicators() const;
};

/// One tensor of this rank.
struct Piece {
  const void* input = nullptr;
  void* output = nullptr;  ///< may equal `input`
  std::int64_t count = 0;
  bool padded = false;  ///< as in BatchMember
  std::span<const std::int64_t>
      counts;  ///< allgather, alltoall: what comes from each rank; reducescatter: what each keeps
  std::span<const std::int64_t> sends;  ///< alltoall: what goes to each rank, one after the other
};

/// A Layout has the pieces that have elements, and where each lies in the fusion buffer.
struct Layout {
  std::vector<const Piece*> pieces;
  std::vector<std::size_t> offsets;
  std::size_t bytes =
      0;  ///< a multiple of kMemberAlignment; the gaps travel too, and nobody reads them
};

std::size_t bytes_of(std::int64_t count, std::size_t element);
/// `element`: bytes of one in the buffer.
Layout lay_out(std::span<const Piece> pieces, std::size_t element);

/// Launches nothing if there is nothing to copy.
void copy(const LaunchContext& context, const std::vector<CopyItem>& items, DataType from,
          DataType to, const Scaling& scaling);
/// Values where they are; launches nothing if it changes nothing.
void scale(const LaunchContext& context, void* values, std::int64_t count, DataType type,
           const Scaling& scaling);
/// Appends to `items` what packing this layout takes. `lanes`: elements of the buffer's type per
/// element of a piece.
void append_packing(std::vector<CopyItem>& items, const Layout& layout, int lanes,
                    std::byte* buffer);
void pack(const LaunchContext& context, const Layout& layout, int lanes, std::byte* buffer,
          DataType from, DataType wire, const Scaling& scaling);
void unpack(const LaunchContext& context, const Layout& layout, int lanes, const std::byte* buffer,
            DataType wire, DataType to, const Scaling& scaling);

/// Each rank of the comm_group gets its `count` elements of the sum of all ranks' `send`.
void reduce_scatter(const LaunchContext& context, const CommGroup& comm_group, const void* send,
                    void* receive, std::size_t count, const ReductionPlan& plan);

/// One NCCL call, in a group or not.
void move(const LaunchContext& context, std::string_view call, NcclCode code,
          const std::optional<Group>& group);

/// Returns whether all ranks' counts are the same.
bool equal_counts(const Piece& piece);
/// Returns whether any of its counts is not zero.
bool moves_anything(const Piece& piece);

// ---- whole batches

/// By the types, operations and factors of `plan_reduction`. With `levels`: each host's ranks sum a
/// share each (ncclReduceScatter), the ranks of the same place sum theirs across hosts, and each
/// host's put the shares together (ncclAllGather), as Horovod's hierarchical allreduce does. A rank
/// alone copies.
void enqueue_allreduce(const LaunchContext& context, const Reduction& reduction,
                       std::span<const Piece> pieces);
/// Bytes are moved as they are.
void enqueue_broadcast(const LaunchContext& context, DataType dtype, int root,
                       std::span<const Piece> pieces);
/// Equal counts by ncclAllGather, others by one ncclBroadcast per rank; all pieces in one NCCL
/// group, none through the fusion buffer.
void enqueue_allgather(const LaunchContext& context, DataType dtype, std::span<const Piece> pieces);
/// One ncclSend and one ncclRecv per piece and other rank where there is something to send, all in
/// one NCCL group; a rank's own part is copied. Nothing goes through the fusion buffer.
void enqueue_alltoall(const LaunchContext& context, DataType dtype, std::span<const Piece> pieces);
/// Through the fusion buffer, sorted by the rank that keeps them, and one ncclReduceScatter, for
/// which all ranks' parts are made as long as the longest (what fills them up nobody reads). Where
/// that would add more than a quarter, as for fewer rows than ranks: one ncclReduce per rank, in
/// one group.
void enqueue_reducescatter(const LaunchContext& context, const Reduction& reduction,
                           std::span<const Piece> pieces);

}  // namespace hvd::gpu
