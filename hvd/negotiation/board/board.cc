#include "hvd/negotiation/board/board.h"

#include <algorithm>

#include "hvd/base/text.h"
#include "hvd/negotiation/board/layout.h"

namespace hvd {

std::size_t Board::bytes_needed(int ranks, std::uint32_t slots) {
  return board_layout::offsets(ranks, slots).end;
}

void Board::format(std::span<std::byte> block, int ranks, std::uint32_t slots) {
  auto* header = new (block.data()) board_layout::Header;
  header->ranks = ranks;
  header->slots = slots;
  make_robust_mutex(header->lock);
  std::byte* areas = block.data() + board_layout::offsets(ranks, slots).areas;
  for (int rank = 0; rank < ranks; ++rank) {
    auto* area = new (areas + static_cast<std::size_t>(rank) * sizeof(board_layout::RankArea))
        board_layout::RankArea;
    make_robust_mutex(area->alive);
  }
  // The slots and rings are words of value zero, which is what zeroed memory is: left untouched, so
  // that unused ones cost no memory.
}

Board::Board(std::span<std::byte> block, int self)
    : view_(block, self),
      reports_{[this] { return find_dead(); }, [this] { return end_if_one_died(); },
               [this](const Status& failure) { set_failure(failure); },
               [this] { return failure(); }},
      lock_(view_.header().lock, view_.header().lock_owner, view_.header().awaited, self, patience_,
            reports_),
      log_(view_),
      rounds_(view_, lock_),
      batches_(view_),
      bells_(view_),
      rings_(view_) {}

void Board::begin_life() {
  pthread_mutex_lock(&view_.area(view_.self()).alive);
  view_.area(view_.self()).born.store(1, std::memory_order_release);
}
void Board::end_life() {
  view_.area(view_.self()).left.store(1, std::memory_order_release);
  pthread_mutex_unlock(&view_.area(view_.self()).alive);
}

std::optional<int> Board::find_dead() {
  for (int rank = 0; rank < view_.ranks(); ++rank)
    if (rank != view_.self() && is_dead(rank)) return rank;
  return std::nullopt;
}

bool Board::end_if_one_died() {
  const auto dead = find_dead();
  if (!dead) return false;
  set_failure({Status::Code::RankFailed, formatted("{} died, or ended without hvd::shutdown()",
                                                   patience_.name_of_rank(*dead))});
  return true;
}

bool Board::is_dead(int rank) {
  board_layout::RankArea& other = view_.area(rank);
  if (other.dead.load(std::memory_order_acquire) != 0) return true;
  if (other.born.load(std::memory_order_acquire) == 0 ||
      other.left.load(std::memory_order_acquire) != 0)
    return false;
  const int result = pthread_mutex_trylock(&other.alive);
  // Noted, for it shows only once: unlocking makes it ENOTRECOVERABLE, and glibc's trylock, which
  // says so, keeps it locked for good.
  if (result == EOWNERDEAD || result == ENOTRECOVERABLE)
    other.dead.store(1, std::memory_order_release);
  // 0: it left between the two looks
  if (result == EOWNERDEAD || result == 0) pthread_mutex_unlock(&other.alive);
  return result == EOWNERDEAD || result == ENOTRECOVERABLE;
}

void Board::beat() {
  auto& beats = view_.area(view_.self()).beats;
  beats.store(beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}
std::uint64_t Board::beats(int rank) const {
  const board_layout::RankArea& other = view_.area(rank);
  return other.left.load(std::memory_order_acquire) != 0
             ? 0
             : other.beats.load(std::memory_order_relaxed);
}

void Board::set_failure(const Status& status) {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failed()) return;
    board_layout::RankArea& own = view_.area(view_.self());
    own.failure_code = status.code();
    const std::size_t length = std::min(status.text().size(), own.failure_text.size() - 1);
    std::copy_n(status.text().data(), length, own.failure_text.data());
    own.failure_text[length] = '\0';
    int expected = board_layout::kNoFailure;
    if (!view_.header().first_failure.compare_exchange_strong(expected, view_.self(),
                                                              std::memory_order_acq_rel))
      return;
  }
  bells_.ring_waiters();
  bells_.ring_all_workers();
}
bool Board::failed() const {
  return view_.header().first_failure.load(std::memory_order_acquire) != board_layout::kNoFailure;
}
Status Board::failure() const {
  const int rank = view_.header().first_failure.load(std::memory_order_acquire);
  if (rank == board_layout::kNoFailure) return {};
  return {view_.area(rank).failure_code, view_.area(rank).failure_text.data()};
}

}  // namespace hvd
