#pragma once
/// P2pExecution is what the batches of P2pBackend have in common: where a member's elements are, in
/// this rank's own memory or in the arenas of the domain, and which ranks take part from where. It
/// is for the thread that has the turn.

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/routes.h"
#include "ops/p2p/context.h"

namespace hvd {

/// Elements are a part of each of a batch's members, laid end to end.
struct Elements {
  Flattened flat;
  std::vector<std::size_t> starts;  ///< per member: where in it the part begins
};

/// MemberParts are the parts of a batch's members, of which `counts` (of BatchMember) are the
/// sizes: summed up once.
class MemberParts {
 public:
  MemberParts(const Batch& batch, std::vector<std::int64_t> BatchMember::*counts)
      : members_(batch.members.size()) {
    for (const auto& member : batch.members) {
      ends_.push_back(0);
      for (const auto count : member.*counts)
        ends_.push_back(ends_.back() + static_cast<std::size_t>(count));
    }
  }
  /// Returns part `number` of every member.
  [[nodiscard]] Elements of(std::size_t number) const {
    std::vector<std::size_t> sizes, starts;
    const std::size_t stride = members_ == 0 ? 0 : ends_.size() / members_;
    for (std::size_t member = 0; member < members_; ++member) {
      const std::size_t at = member * stride + number;
      starts.push_back(ends_[at]);
      sizes.push_back(ends_[at + 1] - ends_[at]);
    }
    return {Flattened(sizes), std::move(starts)};
  }

 private:
  const std::size_t members_;
  std::vector<std::size_t> ends_;  ///< member by member, from 0 on; each has as many parts
};

class P2pExecution : public Execution {
 public:
  P2pExecution(P2pContext& context, Batch batch)
      : context_(context),
        batch_(std::move(batch)),
        state_(context.board().batches().state(batch_.sequence)),
        who_(context.arrange(batch_.ranks)),
        alone_(context.arrange(batch_.traits.set->ranks).alone()),
        element_(element_bytes(batch_.traits.dtype)),
        requests_(context.exchange(), context.staging().owner()) {
    for (const int rank : who_.here()) indices_.push_back(context_.topology().index_here(rank));
  }

 protected:
  [[nodiscard]] std::size_t bytes_of(std::int64_t count) const {
    return static_cast<std::size_t>(count) * element_;
  }
  [[nodiscard]] std::size_t ranks_here() const { return indices_.size(); }
  /// Returns whether no other rank of the set is in this rank's domain, be it joined or not:
  /// `prepare` brought nothing into the arena, and the user's own memory is worked on.
  [[nodiscard]] bool alone() const { return alone_; }
  /// Returns the member in the arena of the rank at this place among the domain's ranks of the set.
  [[nodiscard]] std::byte* shared(const BatchMember& member, std::size_t place) const {
    const int index = indices_[place];
    return context_.staging().address(index, member.locations[static_cast<std::size_t>(index)]);
  }
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const {
    return member.locations[static_cast<std::size_t>(context_.staging().self())];
  }
  /// Returns where that rank's elements are.
  [[nodiscard]] const std::byte* input(const BatchMember& member, std::size_t place) const {
    return alone_ ? static_cast<const std::byte*>(member.input) : shared(member, place);
  }
  /// Copies `bytes` of that rank's input, which begin after `skipped`, to `to`. Returns false if
  /// the rank's process has ended.
  [[nodiscard]] bool read(const BatchMember& member, std::size_t place, std::size_t skipped,
                          void* to, std::size_t bytes) const {
    if (place == who_.self_place) {
      const auto* const from = static_cast<const std::byte*>(member.input) + skipped;
      if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
      return true;
    }
    const int index = indices_[place];
    return context_.staging().read(index, member.locations[static_cast<std::size_t>(index)],
                                   skipped, to, bytes);
  }
  /// Returns where they belong.
  [[nodiscard]] std::byte* output(const BatchMember& member, std::size_t place) const {
    return alone_ ? static_cast<std::byte*>(member.output) : shared(member, place);
  }
  /// Returns the number among those that take part.
  [[nodiscard]] std::size_t number_of(int rank) const {
    return static_cast<std::size_t>(
        std::lower_bound(batch_.ranks.begin(), batch_.ranks.end(), rank) - batch_.ranks.begin());
  }
  [[nodiscard]] int self() const { return who_.here()[who_.self_place]; }
  /// All of every member.
  [[nodiscard]] static Elements all_elements(const Batch& batch) {
    std::vector<std::size_t> counts;
    counts.reserve(batch.members.size());
    for (const auto& member : batch.members)
      counts.push_back(static_cast<std::size_t>(member.count));
    return {Flattened(counts), std::vector<std::size_t>(counts.size())};
  }
  void count_sent_bytes() {
    context_.stats().add(context_.stats().bytes_to_other_hosts, requests_.bytes_to_other_hosts());
  }

  P2pContext& context_;
  const Batch batch_;
  BatchState& state_;
  const Arrangement who_;  ///< of those that take part
  const bool alone_;
  const std::size_t element_;
  std::vector<int> indices_;  ///< in the domain, of its ranks of the set
  Requests requests_;
};

}  // namespace hvd
