#pragma once
/// A Topology says who is where. It is a value, made once at `init()`.
// Tested in tests/torch_bindings/collectives/world_test.cc

#include <algorithm>
#include <cstddef>
#include <vector>

#include "hvd/base/cores.h"

#pragma GCC visibility push(default)
namespace hvd {

/// Topology says who is where, as this rank sees it.
struct Topology {
  int rank = 0;             ///< this rank
  int size = 1;             ///< number of ranks
  int local_rank = 0;       ///< this rank among those of its host
  int local_size = 1;       ///< number of ranks of this host
  int cross_rank = 0;       ///< number of this host
  int cross_size = 1;       ///< number of hosts
  bool homogeneous = true;  ///< all hosts have the same number of ranks
  /// By rank: the number of the host that it is on. Empty where every domain is a host.
  std::vector<int> host_of_rank;

  /// By rank: the number of its domain, the ranks that share memory with each other. A host is one
  /// domain, or, where shared memory is refused, as many as it has ranks.
  std::vector<int> domain_of_rank{0};
  int domains = 1;                   ///< number of domains
  std::vector<int> domain_ranks{0};  ///< global ranks of this rank's domain, ascending
  int domain = 0;                    ///< number of this rank's domain
  int domain_index = 0;              ///< this rank's place in `domain_ranks`

  unsigned cores = detail::usable_cores();  ///< of this host
  /// Returns whether each rank of this host has a core.
  [[nodiscard]] bool has_core() const { return static_cast<unsigned>(local_size) <= cores; }
  /// Returns whether there are cores that the ranks of this host do not need for themselves.
  [[nodiscard]] bool has_spare_core() const { return static_cast<unsigned>(local_size) < cores; }

  /// Returns the number of the host that rank `of` is on.
  [[nodiscard]] int host_of(int of) const {
    const auto& numbers = host_of_rank.empty() ? domain_of_rank : host_of_rank;
    return numbers[static_cast<std::size_t>(of)];
  }

  /// Returns the place of rank `of` in `domain_ranks`; -1 where it is in another domain.
  [[nodiscard]] int index_here(int of) const {
    const auto place = std::lower_bound(domain_ranks.begin(), domain_ranks.end(), of);
    if (place == domain_ranks.end() || *place != of) return -1;
    return static_cast<int>(place - domain_ranks.begin());
  }

  /// Returns the topology of one domain of `size` ranks, seen by `rank`.
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
#pragma GCC visibility pop
