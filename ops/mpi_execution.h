#pragma once
/// Room card: what the batches of MpiBackend have in common: where a member's elements are, in this rank's own memory or in the arenas of
/// the domain, and which ranks take part from where. For the driver's thread only.

#include <algorithm>

#include "ops/mpi_backend.h"

namespace hvd {

class MpiExecution : public Execution {
 public:
  MpiExecution(MpiBackend& backend, Batch batch)
      : backend_(backend),
        batch_(std::move(batch)),
        state_(backend.board().batch(batch_.sequence)),
        who_(backend.arrange(*batch_.traits.set)),
        element_(element_bytes(batch_.traits.dtype)),
        requests_(backend.exchange(), backend.staging().owner()) {
    for (const int rank : who_.here()) indices_.push_back(backend_.domain_index(rank));
  }

 protected:
  [[nodiscard]] std::size_t bytes_of(std::int64_t count) const { return static_cast<std::size_t>(count) * element_; }
  [[nodiscard]] std::size_t ranks_here() const { return indices_.size(); }
  /// The member in the arena of the rank at this place among the domain's ranks of the set.
  [[nodiscard]] std::byte* shared(const BatchMember& member, std::size_t place) const {
    const int index = indices_[place];
    return backend_.staging().address(index, member.locations[static_cast<std::size_t>(index)]);
  }
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const {
    return member.locations[static_cast<std::size_t>(backend_.staging().self())];
  }
  [[nodiscard]] static Flattened flatten(const Batch& batch) {
    std::vector<std::size_t> counts;
    counts.reserve(batch.members.size());
    for (const auto& member : batch.members) counts.push_back(static_cast<std::size_t>(member.count));
    return Flattened(counts);
  }
  void count_sent_bytes() { backend_.stats().add(backend_.stats().bytes_to_other_hosts, requests_.bytes_sent()); }

  MpiBackend& backend_;
  const Batch batch_;
  BatchState& state_;
  const Arrangement who_;
  const std::size_t element_;
  std::vector<int> indices_;  ///< in the domain, of its ranks of the set
  Requests requests_;
};

}  // namespace hvd
