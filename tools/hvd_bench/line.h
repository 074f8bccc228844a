#pragma once
/// Line is --versus line: plain messages between hosts, of as many bytes as an operation has to take out of each host, both ways at once.
/// Nothing is computed, and nothing is copied within a host.
/// Each rank and the rank at its place on every other host send each other their part in messages of 256 KiB; for a broadcast the ranks of
/// the root's host send to those of the next host only. It owns what it sends and receives. One thread; errors of MPI end the job.

#include <mpi.h>

#include <vector>

#include "tools/hvd_bench/options.h"

namespace bench {

class Line {
 public:
  /// `bytes`: of an operation's row. Throws WrongOptions unless there are several hosts, all with the same number of ranks. Collective.
  Line(const Options& options, std::size_t bytes);
  void run();

 private:
  std::vector<int> to_, from_;  ///< ranks
  std::size_t bytes_ = 0;       ///< to or from each
  std::vector<char> sent_, received_;
  std::vector<MPI_Request> requests_;
};

/// Bytes that an operation has to bring from each of `hosts` hosts to each other one, where each has `ranks` ranks.
std::size_t bytes_between_hosts(Collective collective, std::size_t bytes, std::size_t hosts, std::size_t ranks);

}  // namespace bench
