#include "ops/shm/memory/overflow.h"

#include <unistd.h>

#include <algorithm>

#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr unsigned kPlaceBits = 36;
constexpr std::size_t kPlaceUnit = 64;
constexpr std::uint64_t kPlaceMask = (std::uint64_t{1} << kPlaceBits) - 1;
constexpr int kMostDescriptors = 1 << 23;
constexpr std::size_t kLeastSegment = std::size_t{64} << 20;
constexpr std::size_t kSegmentUnit = 4096;

int segment_descriptor(std::uint64_t word) { return static_cast<int>(word >> kPlaceBits); }
std::size_t segment_offset(std::uint64_t word) { return (word & kPlaceMask) * kPlaceUnit; }

}  // namespace

Overflow::Overflow(std::vector<pid_t> processes, int self, std::function<bool()> has_failed)
    : processes_(std::move(processes)), self_(self), has_failed_(std::move(has_failed)) {}

Overflow::Segment& Overflow::add_segment(std::size_t bytes) {
  const std::size_t needed = (bytes + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit;
  std::size_t wanted = std::max(needed, kLeastSegment);
  for (const auto& segment : segments_)
    wanted = std::max(wanted, 2 * segment.mapping->bytes().size());
  const auto make = [](std::size_t size) {
    Segment made;
    made.file = make_shared_file("hvd-overflow", size);
    made.mapping = map_file(made.file, size);
    made.blocks = std::make_unique<Arena>(made.mapping->bytes());
    if (made.file.get() >= kMostDescriptors)
      throw BackendError("shared memory: this process has too many open files");
    return made;
  };
  try {
    segments_.push_back(make(wanted));
  } catch (const BackendError&) {
    if (wanted == needed) throw;
    segments_.push_back(make(needed));  // the process may not use as many addresses
  }
  return segments_.back();
}

std::uint64_t Overflow::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto word = [](const Segment& segment, const std::byte* block) {
    return static_cast<std::uint64_t>(segment.file.get()) << kPlaceBits |
           segment.blocks->offset(block) / kPlaceUnit;
  };
  for (const auto& segment : segments_)
    if (const std::byte* const block = segment.blocks->try_allocate(bytes); block != nullptr)
      return word(segment, block);
  const Segment& fresh = add_segment(bytes);
  return word(fresh, fresh.blocks->allocate(bytes));
}

Overflow::Segment& Overflow::segment_of(std::uint64_t word) {
  const auto is_it = [&](const Segment& segment) {
    return segment.file.get() == segment_descriptor(word);
  };
  const auto found = std::find_if(segments_.begin(), segments_.end(), is_it);
  if (found == segments_.end())
    throw BackendError("shared memory: a block of a segment that this rank does not have");
  return *found;
}

void Overflow::free(std::uint64_t word) noexcept {
  if (has_failed_ && has_failed_()) return;
  const std::lock_guard lock(mutex_);
  const Segment& segment = segment_of(word);
  segment.blocks->free(segment.blocks->at(segment_offset(word)));
}

std::byte* Overflow::address(int index, std::uint64_t word) {
  const std::lock_guard lock(mutex_);
  if (index == self_) return segment_of(word).blocks->at(segment_offset(word));
  auto& mapping = others_[{index, segment_descriptor(word)}];
  const pid_t owner =
      processes_.empty() ? ::getpid() : processes_.at(static_cast<std::size_t>(index));
  if (!mapping) mapping = map_ticket({owner, segment_descriptor(word), 0});
  return mapping->bytes().data() + segment_offset(word);
}

}  // namespace hvd
