#include "tools/hvd_bench/line.h"

#include <hvd/hvd.h>

#include <algorithm>

#include "tools/hvd_bench/workload.h"

namespace bench {

namespace {

// All are posted at once. One long message instead took 1.4 times as long, both ways at once, over Open MPI's TCP.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

}  // namespace

std::size_t bytes_between_hosts(Collective collective, std::size_t bytes, std::size_t hosts, std::size_t ranks) {
  switch (collective) {
    case Collective::Allreduce:
      return 2 * bytes / hosts;
    case Collective::Broadcast:
      return bytes;
    case Collective::Alltoall:
      return bytes * ranks / hosts;
    case Collective::Allgather:
    case Collective::Reducescatter:
      return bytes / hosts;
    case Collective::Barrier:
      break;
  }
  return 0;
}

Line::Line(const Options& options, std::size_t bytes) {
  const int hosts = hvd::cross_size(), ranks = hvd::local_size();
  const bool are_alike = hosts > 1 && hosts * ranks == hvd::size() && hvd::rank() == hvd::cross_rank() * ranks + hvd::local_rank();
  if (largest(are_alike ? 0 : 1) > 0) throw WrongOptions("--versus line: needs several hosts, with the same number of ranks on each");
  bytes_ = bytes_between_hosts(options.collective, bytes, static_cast<std::size_t>(hosts), static_cast<std::size_t>(ranks)) /
           static_cast<std::size_t>(ranks);
  const auto rank_on = [&](int host) { return host % hosts * ranks + hvd::local_rank(); };
  const int here = hvd::cross_rank();
  if (options.collective == Collective::Broadcast) {
    if (here == 0) to_.push_back(rank_on(1));
    if (here == 1) from_.push_back(rank_on(0));
  } else {
    for (int i = 1; i < hosts; ++i) {
      to_.push_back(rank_on(here + i));
      from_.push_back(rank_on(here + hosts - i));
    }
  }
  sent_.resize(to_.size() * bytes_);
  received_.resize(from_.size() * bytes_);
}

void Line::run() {
  requests_.clear();
  for (std::size_t begin = 0; begin < bytes_; begin += kPieceBytes) {
    const int length = static_cast<int>(std::min(kPieceBytes, bytes_ - begin));
    for (std::size_t i = 0; i < from_.size(); ++i)
      MPI_Irecv(received_.data() + i * bytes_ + begin, length, MPI_BYTE, from_[i], 0, MPI_COMM_WORLD, &requests_.emplace_back());
    for (std::size_t i = 0; i < to_.size(); ++i)
      MPI_Isend(sent_.data() + i * bytes_ + begin, length, MPI_BYTE, to_[i], 0, MPI_COMM_WORLD, &requests_.emplace_back());
  }
  MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
}

}  // namespace bench
