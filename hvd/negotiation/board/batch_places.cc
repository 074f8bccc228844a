#include "hvd/negotiation/board/batch_places.h"

#include "hvd/errors.h"
#include "hvd/negotiation/board/layout.h"

namespace hvd {

BatchState& BatchPlaces::state(std::uint64_t sequence) const {
  return board_.header().batches[sequence % kPlaces];
}

std::vector<std::uint64_t> BatchPlaces::find_places(std::size_t count) const {
  std::vector<std::uint64_t> sequences;
  for (std::uint32_t i = 0; i < kPlaces && sequences.size() < count; ++i) {
    const std::uint64_t place = (board_.header().next_place + i) % kPlaces;
    const BatchState& state = board_.header().batches[place];
    if (state.taken.load(std::memory_order_acquire)) continue;
    // The next number after the last that had this place; 0 is none.
    const std::uint64_t last = state.sequence.load(std::memory_order_relaxed);
    sequences.push_back(last != 0 || place == 0 ? last + kPlaces : place);
  }
  if (sequences.size() < count) sequences.clear();
  return sequences;
}

void BatchPlaces::open(std::uint64_t sequence, std::uint32_t group) {
  BatchState& place = state(sequence);
  if (place.taken.load(std::memory_order_acquire))
    throw BackendError("a batch for a place that another has");
  place.sequence.store(sequence, std::memory_order_relaxed);
  place.next_chunk.store(0, std::memory_order_relaxed);
  place.finished.store(0, std::memory_order_relaxed);
  place.complete.store(false, std::memory_order_relaxed);
  place.retired.store(false, std::memory_order_relaxed);
  place.departed.store(0, std::memory_order_relaxed);
  place.taken.store(true, std::memory_order_release);
  ++board_.header().open_batches[group % kOpenCounts];
  board_.header().next_place = static_cast<std::uint32_t>((sequence + 1) % kPlaces);
}
std::uint32_t BatchPlaces::open_count(std::uint32_t group) const {
  return board_.header().open_batches[group % kOpenCounts];
}

bool BatchPlaces::retire(std::uint64_t sequence, std::uint32_t group) {
  if (state(sequence).retired.exchange(true, std::memory_order_acq_rel)) return false;
  --board_.header().open_batches[group % kOpenCounts];
  return true;
}

bool BatchPlaces::is_over(std::uint64_t sequence) const {
  const BatchState& place = state(sequence);
  return !place.taken.load(std::memory_order_acquire) ||
         place.sequence.load(std::memory_order_relaxed) != sequence;
}

void BatchPlaces::depart(std::uint64_t sequence, std::uint32_t members) {
  BatchState& place = state(sequence);
  if (place.departed.fetch_add(1, std::memory_order_acq_rel) + 1 == members)
    place.taken.store(false, std::memory_order_release);
}

}  // namespace hvd
