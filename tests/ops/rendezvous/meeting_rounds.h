#pragma once
/// What ranks do that have met, whatever they met by.

#include <cstddef>
#include <vector>

#include "hvd/errors.h"
#include "ops/rendezvous/meeting.h"

namespace hvd::test {

inline Bytes part_of(int rank, int round) {
  Bytes bytes(static_cast<std::size_t>(rank * 1000 + round));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(static_cast<int>(i) * 7 + rank * 31 + round);
  return bytes;
}

/// Meets in every way, and throws BackendError for what is wrong.
inline void use(Meeting& ranks) {
  ranks.begin();
  for (int round = 0; round < 5; ++round) {
    const auto all = ranks.allgather(part_of(ranks.rank(), round));
    bool is_right = static_cast<int>(all.size()) == ranks.size();
    for (int rank = 0; is_right && rank < ranks.size(); ++rank)
      is_right = all[static_cast<std::size_t>(rank)] == part_of(rank, round);
    if (!is_right) throw BackendError("a wrong allgather");
  }
  if (ranks.find_hosts() != std::vector<int>(static_cast<std::size_t>(ranks.size()), 0))
    throw BackendError("not one host");
  const auto never = [] { return false; };
  for (int round = 0; round < 3; ++round) {
    std::vector<int> set;
    for (int rank = 0; rank < ranks.size(); ++rank) set.push_back(rank);
    if (ranks.give_from_first(set, ranks.rank() == 0 ? part_of(9, round) : Bytes(), 4, never) !=
        part_of(9, round))
      throw BackendError("a wrong gift");
  }
  ranks.barrier();
}

}  // namespace hvd::test
