#include "ops/p2p/alltoall_execution.h"

#include <cstring>
#include <utility>

namespace hvd {

AlltoallExecution::Peer::Peer(Requests& requests, const ChunkedRun& to, const ChunkedRun& from, Elements of_inputs, Elements of_outputs)
    : send(requests, to), receive(requests, from), sent(std::move(of_inputs)), received(std::move(of_outputs)) {}

AlltoallExecution::AlltoallExecution(P2pContext& context, Batch batch) : P2pExecution(context, std::move(batch)) {
  const auto& ranks = batch_.ranks;
  const int tag = context_.tag(batch_, 0);
  const std::size_t chunk = chunk_elements(ranks.size(), element_);
  // Each begins with another one, so that not all send to the same.
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    const std::size_t number = (number_of(self()) + i) % ranks.size();
    if (std::binary_search(who_.here().begin(), who_.here().end(), ranks[number])) continue;
    Elements sent = part_of_members(&BatchMember::sends, number);
    Elements received = part_of_members(&BatchMember::counts, number);
    const ChunkedRun to{ranks[number], tag, sent.flat.size(), element_, chunk};
    const ChunkedRun from{ranks[number], tag, received.flat.size(), element_, chunk};
    peers_.emplace_back(requests_, to, from, std::move(sent), std::move(received));
  }
}

/// What comes from ranks of this domain, this one included. Returns false if one has died.
bool AlltoallExecution::copy_here() {
  for (const auto& member : batch_.members) {
    auto* to = static_cast<std::byte*>(member.output);
    for (std::size_t number = 0; number < batch_.ranks.size(); ++number) {
      const auto found = std::lower_bound(who_.here().begin(), who_.here().end(), batch_.ranks[number]);
      const std::size_t bytes = bytes_of(member.counts[number]);
      if (bytes > 0 && found != who_.here().end() && *found == batch_.ranks[number] &&
          !read(member, static_cast<std::size_t>(found - who_.here().begin()), bytes_of(member.offsets[number]), to, bytes))
        return false;
      to += bytes;
    }
  }
  state_.finished.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

/// Sends and takes what can be sent and taken now.
bool AlltoallExecution::exchange(Peer& peer) {
  bool worked = peer.receive.await();
  for (; peer.send.has_room(); peer.send.send()) {
    std::byte* to = peer.send.buffer();
    peer.sent.flat.each(peer.send.next(), [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
      const auto* from = static_cast<const std::byte*>(batch_.members[index].input);
      std::memcpy(to + before * element_, from + (peer.sent.starts[index] + first) * element_, count * element_);
    });
    worked = true;
  }
  for (; peer.receive.has_next(); peer.receive.take()) {
    peer.received.flat.each(peer.receive.next(), [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
      auto* to = static_cast<std::byte*>(batch_.members[index].output);
      std::memcpy(to + (peer.received.starts[index] + first) * element_, peer.receive.data() + before * element_, count * element_);
    });
    worked = true;
  }
  return worked;
}

Progress AlltoallExecution::advance() {
  bool worked = requests_.poll();
  for (Peer& peer : peers_) worked = exchange(peer) || worked;
  if (!is_lost_ && !copied_here_) {
    copied_here_ = copy_here();
    is_lost_ = !copied_here_;
    worked = true;
  }
  const auto over = [](const Peer& peer) { return peer.send.over() && peer.receive.over(); };
  const bool others_are_done = state_.finished.load(std::memory_order_acquire) == ranks_here();
  if (!others_are_done || !std::all_of(peers_.begin(), peers_.end(), over) || !requests_.idle())
    return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (!alone())
    for (const auto& member : batch_.members) context_.staging().release(my_location(member));
  return Progress::Done;
}

}  // namespace hvd
