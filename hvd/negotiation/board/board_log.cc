#include "hvd/negotiation/board/board_log.h"

#include <algorithm>
#include <cstring>

#include "hvd/negotiation/board/layout.h"

namespace hvd {

namespace {

constexpr std::size_t kLogReserve = 8192;  // for the few-byte records that must never wait for room

}  // namespace

std::uint64_t BoardLog::tail() const {
  return board_.header().tail.load(std::memory_order_seq_cst);
}

std::uint64_t BoardLog::read_position(int rank) const {
  return board_.area(rank).read.load(std::memory_order_acquire);
}

BoardLog::SlowestReader BoardLog::find_slowest() const {
  SlowestReader slowest{PatientWait::kNobody, board_.header().tail.load(std::memory_order_relaxed)};
  for (int rank = 0; rank < board_.ranks(); ++rank)
    if (board_.area(rank).left.load(std::memory_order_acquire) == 0)
      if (const auto position = read_position(rank); position < slowest.position)
        slowest = {rank, position};
  return slowest;
}

void BoardLog::copy_in(std::uint64_t at, std::span<const std::byte> bytes) {
  const std::size_t begin = at % kBytes;
  const std::size_t first = std::min(bytes.size(), kBytes - begin);
  std::memcpy(board_.log() + begin, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(board_.log(), bytes.data() + first, bytes.size() - first);
}

void BoardLog::copy_out(std::uint64_t at, std::span<std::byte> bytes) const {
  const std::size_t begin = at % kBytes;
  const std::size_t first = std::min(bytes.size(), kBytes - begin);
  std::memcpy(bytes.data(), board_.log() + begin, first);
  if (first < bytes.size()) std::memcpy(bytes.data() + first, board_.log(), bytes.size() - first);
}

bool BoardLog::is_unread(std::uint64_t bytes) {
  // nobody reads backwards: what all had read then, all have read
  if (tail() - read_by_all_ <= bytes) return false;
  read_by_all_ = slowest_reader();
  return tail() - read_by_all_ > bytes;
}

bool BoardLog::has_room(std::size_t bytes) {
  const std::size_t needed = sizeof(std::uint32_t) + bytes + kLogReserve;
  return needed <= kBytes && !is_unread(kBytes - needed);
}

void BoardLog::append(std::span<const std::byte> record) {
  const std::uint64_t at = board_.header().tail.load(std::memory_order_relaxed);
  const auto size = static_cast<std::uint32_t>(record.size());
  copy_in(at, std::as_bytes(std::span(&size, 1)));
  copy_in(at + sizeof size, record);
  position_ = at + sizeof size + size;
  board_.area(board_.self()).read.store(position_, std::memory_order_release);
  board_.header().tail.store(position_, std::memory_order_seq_cst);
}

std::optional<Bytes> BoardLog::read_next() {
  auto& read = board_.area(board_.self()).read;  // what was returned before has been acted on
  if (read.load(std::memory_order_relaxed) != position_)
    read.store(position_, std::memory_order_release);
  if (position_ == tail()) return std::nullopt;
  std::uint32_t size = 0;
  copy_out(position_, std::as_writable_bytes(std::span(&size, 1)));
  Bytes record(size);
  copy_out(position_ + sizeof size, record);
  position_ += sizeof size + size;
  return record;
}

}  // namespace hvd
