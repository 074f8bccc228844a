#include "ops/p2p/copy_execution.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/routes.h"

namespace hvd {

CopyExecution::Outgoing::Outgoing(Requests& requests, const ChunkedRun& run, std::vector<int> to,
                                  Elements of_inputs)
    : send(requests, run, std::move(to)), elements(std::move(of_inputs)) {}

CopyExecution::CopyExecution(P2pContext& context, Batch batch)
    : P2pExecution(context, std::move(batch)),
      all_(all_elements(batch_)),
      is_for_one_(alone() || is(OpKind::Alltoall)),
      chunk_elements_(is(OpKind::Broadcast)
                          ? routes::broadcast_piece(all_.flat.size() * element_) / element_
                          : chunk_elements(batch_.ranks.size(), element_)) {
  add_streams();
  if (incoming_.empty() || !(is_for_one_ || leads())) return;
  if (!is_for_one_) begin_collecting();
  for (Incoming& incoming : incoming_) {
    Hop hop = hop_of(incoming.source);
    incoming.receive.emplace(requests_, run(incoming.elements), hop.parent, std::move(hop.children),
                             is_for_one_ ? nullptr : collected(incoming));
  }
}

/// Adds what travels between this rank and the others, or begins here.
void CopyExecution::add_streams() {
  const MemberParts from(batch_, &BatchMember::counts), to(batch_, &BatchMember::sends);
  const std::size_t ranks = batch_.ranks.size();
  // Each rank sends to another one first, so that not all send to the same.
  const std::size_t first = is(OpKind::Alltoall) ? number_of(self()) : 0;
  for (std::size_t i = 0; i < ranks; ++i) {
    const std::size_t number = (first + i) % ranks;
    const int rank = batch_.ranks[number];
    if (is(OpKind::Broadcast) && rank != batch_.traits.root) continue;
    if (is(OpKind::Alltoall) ? !is_here(rank) : rank == self()) {
      Elements sent = is(OpKind::Alltoall) ? to.of(number) : all_;
      const ChunkedRun there = run(sent);
      outgoing_.emplace_back(requests_, there,
                             is(OpKind::Alltoall) ? std::vector{rank} : hop_of(rank).children,
                             std::move(sent));
    }
    if (is_here(rank)) continue;
    const std::size_t offset =
        incoming_.empty()
            ? 0
            : incoming_.back().offset + incoming_.back().elements.flat.size() * element_;
    incoming_.emplace_back(rank, is(OpKind::Broadcast) ? all_ : from.of(number), offset);
  }
}

/// Requires that the stream begins at this rank, or comes to it.
CopyExecution::Hop CopyExecution::hop_of(int source) const {
  const std::size_t domains = who_.domains.size();
  Hop hop{source, {}};
  if (!is(OpKind::Broadcast)) {
    for (std::size_t i = 1; source == self() && i < domains; ++i)
      hop.children.push_back(who_.domains[(who_.self_domain + i) % domains].front());
    return hop;
  }
  const auto begins = std::ranges::find_if(
      who_.domains, [&](const auto& there) { return std::ranges::binary_search(there, source); });
  const auto root = static_cast<std::size_t>(begins - who_.domains.begin());
  const std::size_t chunks = (all_.flat.size() + chunk_elements_ - 1) / chunk_elements_;
  const bool is_chain =
      routes::is_chain(chunks, domains, tree_place(domains, 0, 0).children.size());
  const TreePlace place = is_chain ? chain_place(domains, root, who_.self_domain)
                                   : tree_place(domains, root, who_.self_domain);
  if (place.parent != root) hop.parent = who_.domains[place.parent].front();
  for (const std::size_t child : place.children)
    hop.children.push_back(who_.domains[child].front());
  return hop;
}

/// Leader: makes the block that all ranks of the domain copy from.
void CopyExecution::begin_collecting() {
  const Incoming& last = incoming_.back();
  collected_ = context_.staging().stage(
      nullptr, counters_bytes() + last.offset + last.elements.flat.size() * element_);
  collection_ = context_.staging().address(context_.staging().self(), *collected_);
  for (std::size_t i = 0; i < incoming_.size(); ++i)
    new (collection_ + i * sizeof(Counter)) Counter(0);
  state_.next_chunk.store(*collected_ + 1, std::memory_order_release);
}

/// Puts a range of a stream's elements into the outputs.
void CopyExecution::place(Incoming& incoming, Range range, const std::byte* from) {
  const auto& [flat, starts] = incoming.elements;
  flat.each(range,
            [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
              auto* const to = static_cast<std::byte*>(batch_.members[index].output);
              std::memcpy(to + (starts[index] + first) * element_, from + before * element_,
                          count * element_);
            });
  incoming.placed = range.end;
}

/// Copies what comes from ranks of this domain, this one included. Returns false if one has died.
bool CopyExecution::copy_here() {
  for (const auto& member : batch_.members) {
    auto* to = static_cast<std::byte*>(member.output);
    for (std::size_t number = 0; number < batch_.ranks.size(); ++number) {
      const int rank = batch_.ranks[number];
      if (is(OpKind::Broadcast) && rank != batch_.traits.root) continue;
      const auto found = std::ranges::lower_bound(who_.here(), rank);
      const std::size_t bytes =
          bytes_of(is(OpKind::Broadcast) ? member.count : member.counts[number]);
      const std::size_t skipped = is(OpKind::Alltoall) ? bytes_of(member.offsets[number]) : 0;
      if (bytes > 0 && found != who_.here().end() && *found == rank &&
          !read(member, static_cast<std::size_t>(found - who_.here().begin()), skipped, to, bytes))
        return false;
      to += bytes;
    }
  }
  return true;
}

/// Sends what can be sent now.
bool CopyExecution::send(Outgoing& outgoing) {
  bool worked = false;
  for (; outgoing.send.has_room(); outgoing.send.send()) {
    std::byte* const to = outgoing.send.buffer();
    outgoing.elements.flat.each(outgoing.send.next(), [&](std::size_t index, std::size_t first,
                                                          std::size_t count, std::size_t before) {
      const auto* from = static_cast<const std::byte*>(batch_.members[index].input);
      std::memcpy(to + before * element_,
                  from + (outgoing.elements.starts[index] + first) * element_, count * element_);
    });
    worked = true;
  }
  return worked;
}

/// Takes what has come, and hands it on before anything else.
bool CopyExecution::take(Incoming& incoming) {
  ChunkedReceive& receive = *incoming.receive;
  bool worked = receive.await();
  while (receive.has_next()) {
    const Range range = receive.next();
    const std::byte* const from = receive.data();
    receive.take();
    if (is_for_one_) place(incoming, range, from);
    worked = true;
  }
  return worked;
}

/// Copies what the leader has collected so far.
bool CopyExecution::place_collected() {
  if (collection_ == nullptr)
    if (const std::uint64_t location = state_.next_chunk.load(std::memory_order_acquire);
        location > 0)
      collection_ = context_.staging().address(indices_.front(), location - 1);
  if (collection_ == nullptr) return false;
  bool worked = false;
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    Incoming& incoming = incoming_[i];
    if (incoming.is_placed()) continue;  // the leader may have let go of what is collected
    const Range range{incoming.placed, counter(i).load(std::memory_order_acquire)};
    if (range.size() == 0) continue;
    place(incoming, range, collected(incoming) + range.begin * element_);
    worked = true;
  }
  return worked;
}

Progress CopyExecution::advance() {
  bool worked = requests_.poll();
  for (Outgoing& outgoing : outgoing_) worked = send(outgoing) || worked;
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    Incoming& incoming = incoming_[i];
    if (!incoming.receive || !take(incoming)) continue;
    if (!is_for_one_) counter(i).store(incoming.receive->taken(), std::memory_order_release);
    worked = true;
  }
  if (!is_lost_ && !copied_here_) {
    copied_here_ = copy_here();
    is_lost_ = !copied_here_;
    worked = true;
  }
  if (!is_for_one_ && !incoming_.empty() && !counted_) worked = place_collected() || worked;
  const bool has_all = std::ranges::all_of(incoming_, &Incoming::is_placed);
  if (copied_here_ && (is_for_one_ || has_all) && !std::exchange(counted_, true)) {
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
    worked = true;
  }
  const bool has_sent =
      std::ranges::all_of(outgoing_, [](const Outgoing& outgoing) { return outgoing.send.over(); });
  if (!counted_ || !has_all || !has_sent ||
      state_.finished.load(std::memory_order_acquire) != ranks_here() || !requests_.idle())
    return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (alone()) return Progress::Done;
  for (const auto& member : batch_.members) context_.staging().release(my_location(member));
  if (collected_) context_.staging().release(*collected_);
  return Progress::Done;
}

}  // namespace hvd
