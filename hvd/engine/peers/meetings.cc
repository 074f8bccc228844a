#include "hvd/engine/peers/meetings.h"

#include <algorithm>

namespace hvd {

std::uint64_t Meetings::come() {
  attention_.expect_elsewhere();
  parts_.board->rings().set_meetings(++come_);
  PeerFrameHead head;
  head.kind = PeerFrameKind::Came;
  head.words[0] = come_;
  for (int rank = 0; rank < parts_.topology.size; ++rank)
    if (links_.is_elsewhere(rank)) links_.send(rank, head);
  return come_;
}

void Meetings::hear(int from, std::uint64_t meetings) {
  auto& heard = heard_[static_cast<std::size_t>(from)];
  heard = std::max(heard, meetings);
}

std::vector<int> Meetings::missing(std::uint64_t meeting, bool& is_hopeless) {
  std::vector<int> missing;
  for (int rank = 0; rank < parts_.topology.size; ++rank) {
    const std::uint64_t came = links_.is_elsewhere(rank)
                                   ? heard_[static_cast<std::size_t>(rank)]
                                   : parts_.board->rings().meetings(links_.index_of(rank));
    if (came < meeting) missing.push_back(rank);
  }
  is_hopeless = true;
  for (const int rank : missing) {
    // What it sent before it left may still be under way.
    const bool is_elsewhere = links_.is_elsewhere(rank);
    if (is_elsewhere) departures_.ask(rank);
    is_hopeless =
        is_hopeless && (is_elsewhere ? departures_.is_hopeless(rank) : departures_.has_left(rank));
  }
  return missing;
}

}  // namespace hvd
