#pragma once
/// What --versus measures beside hvd: the same work by plain calls of MPI, by copies, and by plain
/// messages between hosts. Errors of MPI end the job. One thread.

#include <mpi.h>

#include <optional>
#include <vector>

#include "tools/hvd_bench/options.h"
#include "tools/hvd_bench/workload.h"

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

/// MPI_Iallreduce of each, then MPI_Waitall.
void run_raw_burst(const std::vector<hvd::Buffer>& inputs, const std::vector<hvd::Buffer>& outputs,
                   hvd::ReduceOp op);

/// --versus: plain calls on ordinary memory of the same size.
class Rival {
 public:
  Rival(const Options& options, const std::vector<std::size_t>& counts);
  void run_mpi() const;
  void run_packed() const;
  void run_memcpy() const;

 private:
  const Options& options_;
  Tensors input_, output_;
  std::optional<Tensors> packed_;
};

/// --versus line: plain messages between hosts, of as many bytes as an operation has to take out of
/// each host, both ways at once. Nothing is computed, and nothing is copied within a host. Each
/// rank and the rank at its place on every other host send each other their part in messages of 256
/// KiB; for a broadcast the ranks of the root's host send to those of the next host only.
class Line {
 public:
  /// `bytes`: of an operation's row. Throws WrongOptions unless there are several hosts, all with
  /// the same number of ranks. Collective.
  Line(const Options& options, std::size_t bytes);
  void run();

 private:
  std::vector<int> to_, from_;  ///< ranks
  std::size_t bytes_ = 0;       ///< to or from each
  std::vector<char> sent_, received_;
  std::vector<MPI_Request> requests_;
};

}  // namespace bench
