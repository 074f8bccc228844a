#pragma once
/// A Table is a hvd::Negotiator that several hosts read. What the root decides reaches all hosts in
/// the same order, so their tables are equal; one that a group of hosts shares reads each record
/// once, when the first of them gets to it, and the others are held to the same records byte by
/// byte. What differs between hosts, the order of introductions, does not reach the decisions. It
/// fails by throwing std::logic_error: the hosts have drifted apart.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "hvd/negotiation/table/negotiator.h"
#include "tests/scale/clock.h"
#include "tests/scale/program.h"

namespace scale {

struct World;

class Table {
 public:
  /// As the first rank of `host` sees the world.
  Table(const World& world, const Program& program, int host);

  [[nodiscard]] const hvd::Negotiator& negotiator() const { return negotiator_; }
  [[nodiscard]] std::size_t decisions() const { return decided_.size(); }

  [[nodiscard]] bool knows(std::size_t unit, int rank) const {
    return introduced_[unit][static_cast<std::size_t>(rank)];
  }
  /// Processor time of one introduction, on average.
  [[nodiscard]] Time introduction_took() const {
    return introducing_ / std::max<std::int64_t>(1, introductions_);
  }
  /// `rank` says what it sends. Returns the processor time that the record takes a host that reads
  /// it.
  Time introduce(const Unit& unit, std::size_t index, int rank);
  /// All ranks of a host are ready for `unit`: what the record brings to the notice of the leader
  /// tree.
  struct Ready {
    hvd::Agreement what;
    Time took;
  };
  Ready ready(const Unit& unit, int last_rank);

  struct Decision {
    hvd::Bytes record;
    std::vector<hvd::CutBatch> batches;
    Time took;
  };
  /// The `place`-th decision of the root, as it has reached a host.
  const Decision& decide(std::size_t place, hvd::Bytes record);
  /// The same, where it is a cut of the global process set.
  const Decision& decide_cut(std::size_t place);

 private:
  hvd::Outcomes apply(const hvd::Bytes& record);

  hvd::Negotiator negotiator_;
  std::uint64_t position_ = 0;
  std::deque<Decision> decided_;
  std::vector<std::vector<bool>> introduced_;  // by unit and rank
  Time introducing_{0};
  std::int64_t introductions_ = 0;
};

}  // namespace scale
