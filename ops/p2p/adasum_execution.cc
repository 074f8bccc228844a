#include "ops/p2p/adasum_execution.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "ops/host_ops.h"
#include "ops/kernels/adasum.h"

namespace hvd {

namespace {
constexpr unsigned kUp = 0;
constexpr unsigned kDown = 1;

/// Returns the place of domain `self` of `present` in the tree of pairs over `all` domains.
PlaceAmongPairs place_among_pairs(const Arrangement& all, const Arrangement& present,
                                  std::size_t self) {
  struct Slot {
    std::optional<std::size_t> domain;
    double ranks = 0;
  };
  std::vector<Slot> slots;
  for (const auto& domain : all.domains) {
    auto& slot = slots.emplace_back(std::nullopt, static_cast<double>(domain.size()));
    for (std::size_t i = 0; i < present.domains.size(); ++i)
      if (std::binary_search(domain.begin(), domain.end(), present.domains[i].front()))
        slot.domain = i;
  }
  PlaceAmongPairs result;
  result.parent = self;
  while (slots.size() > 1) {
    std::vector<Slot> next;
    for (std::size_t i = 0; i < slots.size(); i += 2) {
      const Slot& a = slots[i];
      const Slot b = i + 1 < slots.size() ? slots[i + 1] : Slot{};
      if (a.domain && b.domain && *a.domain == self) {
        result.children.push_back(*b.domain);
        result.ranks.push_back({a.ranks, b.ranks});
      }
      if (a.domain && b.domain && *b.domain == self) result.parent = *a.domain;
      next.push_back({a.domain ? a.domain : b.domain, a.ranks + b.ranks});
    }
    slots = std::move(next);
  }
  std::reverse(result.children.begin(), result.children.end());  // the largest subtree first
  return result;
}
}  // namespace

AdasumExecution::AdasumExecution(P2pContext& context, Batch batch)
    : P2pExecution(context, std::move(batch)),
      flat_(all_elements(batch_).flat),
      all_(context.arrange(batch_.traits.set->ranks)),
      tree_(place_among_pairs(all_, who_, who_.self_domain)) {
  here_ = reduction_of(batch_.traits);
  across_ = here_;
  across_.prescale = 1;
  if (who_.domains.size() > 1) here_.postscale = 1;
}

ChunkedRun AdasumExecution::run(unsigned phase) const {
  return {context_.tag(batch_, phase), flat_.size(), element_, chunk_elements(1, element_)};
}

/// Out of what this leader holds, and into it.
void AdasumExecution::pack(Range range, std::byte* to) const {
  flat_.each(range,
             [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
               std::memcpy(to + before * element_,
                           output(batch_.members[index], 0) + first * element_, count * element_);
             });
}

void AdasumExecution::unpack(Range range, const std::byte* from) {
  flat_.each(range,
             [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
               std::memcpy(output(batch_.members[index], 0) + first * element_,
                           from + before * element_, count * element_);
             });
}

/// Claims tensors and combines the inputs of the domain's ranks, into the leader's blocks.
bool AdasumExecution::combine_here() {
  bool worked = false;
  std::vector<const void*> in;
  while (!claimed_all_) {
    const std::uint64_t index = state_.next_chunk.fetch_add(1, std::memory_order_relaxed);
    claimed_all_ = index >= batch_.members.size();
    if (claimed_all_) break;
    const auto& member = batch_.members[index];
    in.clear();
    std::size_t place = 0;
    for (const int rank : all_.here())
      in.push_back(place < ranks_here() && who_.here()[place] == rank ? input(member, place++)
                                                                      : nullptr);
    const std::array<void*, 1> out{output(member, 0)};
    kernels::adasum(here_, in, out, static_cast<std::size_t>(member.count));
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
    worked = true;
  }
  return worked;
}

/// Leader: takes the results of the children, the nearest first, and combines each with its own.
bool AdasumExecution::gather() {
  if (gathered_ == tree_.children.size()) {
    step_ = Step::SendUp;
    return true;
  }
  if (!from_child_) {
    from_child_.emplace(requests_, run(kUp),
                        leader_of(tree_.children[tree_.children.size() - 1 - gathered_]));
    if (theirs_.empty()) theirs_ = requests_.buffer(flat_.size() * element_);
  }
  bool worked = from_child_->await();
  for (; from_child_->has_next(); from_child_->take()) {
    const Range range = from_child_->next();
    std::memcpy(theirs_.data() + range.begin * element_, from_child_->data(),
                range.size() * element_);
    worked = true;
  }
  if (!from_child_->over()) return worked;
  from_child_.reset();
  const auto& ranks = tree_.ranks[gathered_++];
  kernels::Reduction reduction = across_;
  if (!is_root() || gathered_ < tree_.children.size()) reduction.postscale = 1;
  const std::byte* at = theirs_.data();
  for (const auto& member : batch_.members) {
    const std::array<const void*, 2> in{output(member, 0), at};
    const std::array<void*, 1> out{output(member, 0)};
    kernels::adasum(reduction, in, out, static_cast<std::size_t>(member.count), ranks);
    at += bytes_of(member.count);
  }
  return true;
}

bool AdasumExecution::send_up() {
  if (is_root()) {
    held_ = flat_.size();
  } else {
    if (!to_parent_) to_parent_.emplace(requests_, run(kUp), std::vector{leader_of(tree_.parent)});
    bool worked = false;
    for (; to_parent_->has_room(); to_parent_->send()) {
      pack(to_parent_->next(), to_parent_->buffer());
      worked = true;
    }
    if (!to_parent_->over()) return worked;
    from_parent_.emplace(requests_, run(kDown), leader_of(tree_.parent));
  }
  std::vector<int> children;
  for (const std::size_t child : tree_.children) children.push_back(leader_of(child));
  if (!children.empty()) to_children_.emplace(requests_, run(kDown), std::move(children));
  step_ = Step::HandDown;
  return true;
}

/// Leader: takes the result from its parent and hands it on, chunk by chunk.
bool AdasumExecution::hand_down() {
  bool worked = false;
  if (from_parent_) {
    worked = from_parent_->await();
    for (; from_parent_->has_next(); from_parent_->take()) {
      unpack(from_parent_->next(), from_parent_->data());
      held_ = from_parent_->next().end;
      worked = true;
    }
  }
  for (; to_children_ && to_children_->has_room() && to_children_->next().end <= held_;
       to_children_->send()) {
    pack(to_children_->next(), to_children_->buffer());
    worked = true;
  }
  if (held_ < flat_.size() || (to_children_ && !to_children_->over())) return worked;
  state_.complete.store(true, std::memory_order_release);
  step_ = Step::Wait;
  return true;
}

bool AdasumExecution::lead() {
  switch (step_) {
    case Step::Combine:
      if (state_.finished.load(std::memory_order_acquire) < batch_.members.size()) return false;
      step_ = Step::Gather;
      return true;
    case Step::Gather: return gather();
    case Step::SendUp: return send_up();
    case Step::HandDown: return hand_down();
    case Step::Wait: break;
  }
  return false;
}

Progress AdasumExecution::advance() {
  bool worked = combine_here();
  if (!leads()) {
    if (!state_.complete.load(std::memory_order_acquire))
      return worked ? Progress::Advanced : Progress::Idle;
    for (const auto& member : batch_.members) {
      if (member.count > 0) std::memcpy(member.output, output(member, 0), bytes_of(member.count));
      context_.staging().release(my_location(member));
    }
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
    return Progress::Done;
  }
  worked = requests_.poll() || worked;
  while (lead()) {
    worked = true;
    requests_.poll();
  }
  const std::size_t all_copied = batch_.members.size() + ranks_here() - 1;
  if (step_ != Step::Wait || state_.finished.load(std::memory_order_acquire) < all_copied ||
      !requests_.idle())
    return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (!alone())
    for (const auto& member : batch_.members)
      context_.staging().take_out(my_location(member), member.output, bytes_of(member.count));
  return Progress::Done;
}

}  // namespace hvd
