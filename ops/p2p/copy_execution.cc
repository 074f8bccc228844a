#include "ops/p2p/copy_execution.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "hvd/routes.h"

namespace hvd {

namespace {

// Of an allgather's messages: buffers, no choice of a way.
constexpr std::size_t kMostChunkBytes = 1 << 20;
constexpr std::size_t kLeastChunkBytes = 64 << 10;
constexpr std::size_t kGatherBytes = 32 << 20;  // chunks that a rank may await at once, all sources together

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- broadcast

int BroadcastExecution::leader(std::span<const int> ranks, int root) {
  return std::binary_search(ranks.begin(), ranks.end(), root) ? root : ranks.front();
}

BroadcastExecution::BroadcastExecution(P2pContext& context, Batch batch) : P2pExecution(context, std::move(batch)), flat_(flatten(batch_)) {
  const int root = batch_.traits.root;
  const auto leader_of = [&](std::size_t domain) { return leader(who_.domains[domain], root); };
  const auto& here = who_.here();
  leader_ = static_cast<std::size_t>(std::find(here.begin(), here.end(), leader_of(who_.self_domain)) - here.begin());
  chunk_elements_ = routes::broadcast_piece(flat_.size() * element_) / element_;
  chunks_ = (flat_.size() + chunk_elements_ - 1) / chunk_elements_;
  const std::size_t domains = who_.domains.size();
  is_chain_ = routes::is_chain(chunks_, domains, tree_place(domains, 0, 0).children.size());
  if (!leads()) return;
  std::size_t root_domain = 0;
  while (!std::binary_search(who_.domains[root_domain].begin(), who_.domains[root_domain].end(), root)) ++root_domain;
  const TreePlace tree =
      is_chain_ ? chain_place(domains, root_domain, who_.self_domain) : tree_place(domains, root_domain, who_.self_domain);
  if (who_.self_domain != root_domain) parent_ = leader_of(tree.parent);
  for (const std::size_t child : tree.children) children_.push_back(leader_of(child));
}

Range BroadcastExecution::chunk(std::size_t number) const {
  return {number * chunk_elements_, std::min((number + 1) * chunk_elements_, flat_.size())};
}

/// Leader: awaits the next chunk, or, root, reads it from the source.
bool BroadcastExecution::begin_next() {
  if (begun_ == chunks_ || begun_ - held_ == kWindow) return false;
  ChunkSlot& slot = slots_[begun_ % kWindow];
  if (slot.sending > 0) return false;
  const Range range = chunk(begun_);
  if (slot.buffer.empty() && !(is_root() && children_.empty()))
    slot.buffer = requests_.buffer(std::min(chunk_elements_, flat_.size()) * element_);
  if (!is_root()) {
    requests_.receive(slot.buffer.first(range.size() * element_), parent_, context_.tag(batch_, 0), slot.awaited);
  } else {
    flat_.each(range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
      const auto& member = batch_.members[index];
      const auto* from = input(member, leader_) + first * element_;
      if (!children_.empty()) copy_bytes(slot.buffer.data() + before * element_, from, count * element_);
      if (alone()) copy_bytes(static_cast<std::byte*>(member.output) + first * element_, from, count * element_);
    });
  }
  ++begun_;
  return true;
}

/// Leader: puts the next chunk that is here where it belongs and sends it on.
bool BroadcastExecution::hand_on_next() {
  if (held_ == begun_ || slots_[held_ % kWindow].awaited > 0) return false;
  ChunkSlot& slot = slots_[held_ % kWindow];
  const Range range = chunk(held_);
  for (const int child : children_)
    requests_.send_synchronously(slot.buffer.first(range.size() * element_), child, context_.tag(batch_, 0), slot.sending);
  if (!is_root())
    flat_.each(range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
      const auto& member = batch_.members[index];
      auto* to = output(member, leader_);
      copy_bytes(to + first * element_, slot.buffer.data() + before * element_, count * element_);
    });
  ++held_;
  if (!alone()) state_.next_chunk.store(held_, std::memory_order_release);
  return true;
}

/// Other ranks of the domain.
bool BroadcastExecution::copy_next() {
  if (held_ == chunks_ || state_.next_chunk.load(std::memory_order_acquire) <= held_) return false;
  flat_.each(chunk(held_), [&](std::size_t index, std::size_t first, std::size_t count, std::size_t /*before*/) {
    const auto& member = batch_.members[index];
    copy_bytes(static_cast<std::byte*>(member.output) + first * element_, shared(member, leader_) + first * element_, count * element_);
  });
  ++held_;
  return true;
}

Progress BroadcastExecution::advance() {
  bool worked = requests_.poll();
  if (!leads()) {
    while (copy_next()) worked = true;
    if (held_ < chunks_) return worked ? Progress::Advanced : Progress::Idle;
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
    return Progress::Done;
  }
  while (hand_on_next() || begin_next()) {
    worked = true;
    requests_.poll();
  }
  const bool others_have_it = state_.finished.load(std::memory_order_acquire) + 1 == ranks_here();
  if (held_ < chunks_ || !others_have_it || !requests_.idle()) return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (alone()) return Progress::Done;
  for (const auto& member : batch_.members) {
    if (is_root() && member.input == member.output) {
      context_.staging().release(my_location(member));
    } else {
      context_.staging().take_out(my_location(member), member.output, bytes_of(member.count));
    }
  }
  return Progress::Done;
}

// ----------------------------------------------------------------------------------------------------------------- allgather

AllgatherExecution::AllgatherExecution(P2pContext& context, Batch batch) : P2pExecution(context, std::move(batch)) {
  const auto& ranks = batch_.ranks;
  chunk_elements_ = std::clamp(kGatherBytes / (ranks.size() * kWindow), kLeastChunkBytes, kMostChunkBytes) / element_;
  for (const auto& member : batch_.members) {
    auto& before = before_.emplace_back(1, 0);
    for (const auto count : member.counts) before.push_back(before.back() + static_cast<std::size_t>(count));
  }
  std::size_t offset = 0;
  for (std::size_t number = 0; number < ranks.size(); ++number) {
    Source source = make_source(number);
    if (std::binary_search(who_.here().begin(), who_.here().end(), source.rank)) {
      here_.push_back(std::move(source));
    } else {
      source.offset = offset;
      offset += source.flat.size() * element_;
      elsewhere_.push_back(std::move(source));
    }
  }
  for (std::size_t i = 1; i < who_.domains.size(); ++i)
    receivers_.push_back(who_.domains[(who_.self_domain + i) % who_.domains.size()].front());
  if (alone() || !leads()) return;
  collected_ = context_.staging().stage(nullptr, counters_bytes() + offset);
  collection_ = context_.staging().address(context_.staging().self(), *collected_);
  for (std::size_t i = 0; i < elsewhere_.size(); ++i) new (collection_ + i * sizeof(Counter)) Counter(0);
  state_.next_chunk.store(*collected_ + 1, std::memory_order_release);
}

AllgatherExecution::Source AllgatherExecution::make_source(std::size_t number) const {
  std::vector<std::size_t> counts;
  counts.reserve(batch_.members.size());
  for (const auto& member : batch_.members) counts.push_back(static_cast<std::size_t>(member.counts[number]));
  return {number, batch_.ranks[number], Flattened(counts), 0};
}

Range AllgatherExecution::chunk(const Flattened& flat, std::size_t number) const {
  return {number * chunk_elements_, std::min((number + 1) * chunk_elements_, flat.size())};
}

/// Puts a range of a rank's elements into the outputs.
void AllgatherExecution::place(const Source& source, Range range, const std::byte* from) {
  source.flat.each(range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
    auto* to = static_cast<std::byte*>(batch_.members[index].output);
    copy_bytes(to + (before_[index][source.number] + first) * element_, from + before * element_, count * element_);
  });
}

/// Returns false if a rank of this domain has died.
bool AllgatherExecution::copy_here() {
  for (std::size_t at = 0; at < here_.size(); ++at)
    for (std::size_t index = 0; index < batch_.members.size(); ++index) {
      const auto& member = batch_.members[index];
      const auto number = here_[at].number;
      auto* const to = static_cast<std::byte*>(member.output) + before_[index][number] * element_;
      if (!read(member, at, 0, to, bytes_of(member.counts[number]))) return false;
    }
  return true;
}

/// Sends the next chunk of this rank's own to all other domains.
bool AllgatherExecution::send_next() {
  const Flattened& flat = here_[who_.self_place].flat;
  ChunkSlot& slot = outgoing_[sent_ % kWindow];
  if (receivers_.empty() || sent_ == chunks(flat) || slot.sending > 0) return false;
  if (slot.buffer.empty()) slot.buffer = requests_.buffer(std::min(chunk_elements_, flat.size()) * element_);
  const Range range = chunk(flat, sent_);
  flat.each(range, [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
    copy_bytes(slot.buffer.data() + before * element_, static_cast<const std::byte*>(batch_.members[index].input) + first * element_,
               count * element_);
  });
  for (const int receiver : receivers_)
    requests_.send_synchronously(slot.buffer.first(range.size() * element_), receiver, context_.tag(batch_, 0), slot.sending);
  ++sent_;
  return true;
}

/// Leader: takes the next chunk of one source, and awaits another.
bool AllgatherExecution::receive_next(Source& source) {
  if (source.arrived < source.begun && source.slots[source.arrived % kWindow].awaited == 0) {
    if (alone()) place(source, chunk(source.flat, source.placed++), source.slots[source.arrived % kWindow].buffer.data());
    ++source.arrived;
    if (!alone()) counter(source).store(source.arrived, std::memory_order_release);
    return true;
  }
  if (source.begun == chunks(source.flat) || source.begun - source.arrived == kWindow) return false;
  ChunkSlot& slot = source.slots[source.begun % kWindow];
  const Range range = chunk(source.flat, source.begun);
  std::span<std::byte> to;
  if (alone()) {
    if (slot.buffer.empty()) slot.buffer = requests_.buffer(std::min(chunk_elements_, source.flat.size()) * element_);
    to = slot.buffer.first(range.size() * element_);
  } else {
    to = {collected(source, range.begin), range.size() * element_};
  }
  requests_.receive(to, source.rank, context_.tag(batch_, 0), slot.awaited);
  ++source.begun;
  return true;
}

/// Places the chunks of a source that the leader has collected so far.
bool AllgatherExecution::place_collected(Source& source) {
  const std::size_t arrived = counter(source).load(std::memory_order_acquire);
  if (source.placed == arrived) return false;
  const Range range{source.placed * chunk_elements_, std::min(arrived * chunk_elements_, source.flat.size())};
  place(source, range, collected(source, range.begin));
  source.placed = arrived;
  return true;
}

/// Sees to it that what comes from elsewhere gets into the outputs.
bool AllgatherExecution::collect() {
  bool worked = false;
  if (leads())
    for (auto& source : elsewhere_)
      while (receive_next(source)) worked = true;
  if (!copied_here_ || has_all_) return worked;
  if (collection_ == nullptr && !alone())
    if (const std::uint64_t location = state_.next_chunk.load(std::memory_order_acquire); location > 0)
      collection_ = context_.staging().address(indices_.front(), location - 1);
  if (collection_ != nullptr)
    for (auto& source : elsewhere_) worked = place_collected(source) || worked;
  const auto is_placed = [this](const Source& source) { return source.placed == chunks(source.flat); };
  if (!std::all_of(elsewhere_.begin(), elsewhere_.end(), is_placed)) return worked;
  has_all_ = true;
  state_.finished.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

Progress AllgatherExecution::advance() {
  bool worked = requests_.poll();
  while (send_next()) worked = true;
  worked = collect() || worked;
  if (!is_lost_ && !copied_here_) {
    copied_here_ = copy_here();
    is_lost_ = !copied_here_;
    collect();
    worked = true;
  }
  const bool all_have_it = state_.finished.load(std::memory_order_acquire) == ranks_here();
  if (!has_all_ || !all_have_it || !requests_.idle()) return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (alone()) return Progress::Done;
  for (const auto& member : batch_.members) context_.staging().release(my_location(member));
  if (collected_) context_.staging().release(*collected_);
  return Progress::Done;
}

}  // namespace hvd
