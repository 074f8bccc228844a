#pragma once
/// These are plain MPI calls for --versus, with nothing around them. Errors end the job, as MPI does by default.

#include <mpi.h>

#include <optional>
#include <vector>

#include "tools/hvd_bench/options.h"

namespace bench {

std::optional<MPI_Datatype> mpi_type(hvd::DataType dtype);

/// MPI started before hvd, which then adopts it, and finalized after it.
class RawMpi {
 public:
  RawMpi();
  ~RawMpi();
  RawMpi(const RawMpi&) = delete;
  RawMpi& operator=(const RawMpi&) = delete;
  /// All ranks are through with everything: the destructor may finalize, which waits for all.
  void all_is_done() { done_ = true; }

 private:
  bool done_ = false;
};

/// One operation of `count` elements of this rank's input (of all ranks' output for an allgather). An average and an Adasum are
/// timed as a sum.
void run_raw(Collective collective, const void* input, void* output, std::size_t count, hvd::DataType dtype, hvd::ReduceOp op);
/// An allreduce of `count` elements where they are.
void run_raw_in_place(void* data, std::size_t count, hvd::DataType dtype, hvd::ReduceOp op);
/// MPI_Iallreduce of each, then MPI_Waitall.
void run_raw_burst(const std::vector<hvd::Buffer>& inputs, const std::vector<hvd::Buffer>& outputs, hvd::ReduceOp op);

}  // namespace bench
