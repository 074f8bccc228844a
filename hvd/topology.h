#pragma once
/// Who is where. Made once at `init()`; a value.

#include <cstddef>
#include <string>
#include <vector>

namespace hvd {

struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;
  int cross_size = 1;
  bool homogeneous = true;
  /// The host that each rank is on, numbered from 0. Empty: every domain is a host.
  std::vector<int> host_of_rank;

  /// Ranks that share memory with each other. A host is one domain, or, where shared memory is refused, as many as it has ranks.
  std::vector<int> domain_of_rank{0};
  int domains = 1;
  std::vector<int> domain_ranks{0};  ///< global ranks of this rank's domain, ascending
  int domain = 0;                    ///< number of this rank's domain
  int domain_index = 0;              ///< this rank's place in `domain_ranks`

  [[nodiscard]] int host_of(int of) const {
    const auto& numbers = host_of_rank.empty() ? domain_of_rank : host_of_rank;
    return numbers[static_cast<std::size_t>(of)];
  }

  /// One domain of `size` ranks, seen by `rank`.
  static Topology single_domain(int rank, int size) {
    Topology topology;
    topology.rank = topology.local_rank = topology.domain_index = rank;
    topology.size = topology.local_size = size;
    topology.domain_of_rank.assign(static_cast<std::size_t>(size), 0);
    topology.domain_ranks.resize(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) topology.domain_ranks[static_cast<std::size_t>(r)] = r;
    return topology;
  }
};

}  // namespace hvd
