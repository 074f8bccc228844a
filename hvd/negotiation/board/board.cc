#include "hvd/negotiation/board/board.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "hvd/base/waits.h"
#include "hvd/negotiation/board/board_layout.h"

namespace hvd {

namespace {

constexpr std::size_t kLogReserve = 8192;  // for the few-byte records that must never wait for room

constexpr std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

void ring(FutexWord& bell, const std::atomic<std::uint32_t>& sleepers) {
  bell.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(bell);
}

void sleep_on(FutexWord& bell, std::atomic<std::uint32_t>& sleepers, std::uint32_t seen, std::chrono::nanoseconds timeout) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell.load(std::memory_order_seq_cst) == seen) futex_wait(bell, seen, timeout);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

constexpr std::uint64_t kClaimed = std::uint64_t{1} << 31;
constexpr unsigned kClaimantBits = 16;  // from here on, below kClaimed, its index
constexpr std::uint64_t kArrivals = (std::uint64_t{1} << kClaimantBits) - 1;
constexpr unsigned kCompanyBits = 2;  // of a result_round

constexpr std::uint64_t claimed_by(int rank) { return kClaimed | static_cast<std::uint64_t>(rank) << kClaimantBits; }
constexpr int claimant_of(std::uint64_t word) {
  return (word & kClaimed) == 0 ? Board::kNobody : static_cast<int>((word & (kClaimed - 1)) >> kClaimantBits);
}

}  // namespace

std::size_t Board::bytes_needed(int ranks, std::uint32_t slots) {
  const auto n = static_cast<std::size_t>(ranks);
  return round_up(sizeof(Header), board_layout::kPage) + round_up(n * sizeof(RankArea), board_layout::kPage) +
         round_up(slots * (sizeof(SlotHead) + n * sizeof(SlotRank)), board_layout::kPage) + kLogBytes;
}

void Board::format(std::span<std::byte> block, int ranks, std::uint32_t slots) {
  auto* header = new (block.data()) Header;
  header->ranks = ranks;
  header->slots = slots;
  make_robust_mutex(header->lock);
  std::byte* areas = block.data() + round_up(sizeof(Header), board_layout::kPage);
  for (int rank = 0; rank < ranks; ++rank) {
    auto* area = new (areas + static_cast<std::size_t>(rank) * sizeof(RankArea)) RankArea;
    make_robust_mutex(area->alive);
  }
  // The slots are atomics of value zero, which is what zeroed memory is: left untouched, so that unused ones cost no memory.
}

Board::Board(std::span<std::byte> block, int self)
    : block_(block),
      self_(self),
      ranks_(reinterpret_cast<Header*>(block.data())->ranks),
      slots_(reinterpret_cast<Header*>(block.data())->slots),
      areas_at_(round_up(sizeof(Header), board_layout::kPage)),
      slots_at_(areas_at_ + round_up(static_cast<std::size_t>(ranks_) * sizeof(RankArea), board_layout::kPage)),
      slot_bytes_(sizeof(SlotHead) + static_cast<std::size_t>(ranks_) * sizeof(SlotRank)),
      log_at_(slots_at_ + round_up(slots_ * slot_bytes_, board_layout::kPage)),
      reports_{[this] { return find_dead(); }, [this](const Status& failure) { set_failure(failure); }, [this] { return failure(); }},
      lock_(header().lock, header().lock_owner, header().awaited, self_, patience_, reports_) {}

// On the way of small operations, of which they would be a twentieth as calls.
[[gnu::always_inline]] inline Board::Header& Board::header() const { return *reinterpret_cast<Header*>(block_.data()); }
Board::RankArea& Board::area(int rank) const {
  return *reinterpret_cast<RankArea*>(block_.data() + areas_at_ + static_cast<std::size_t>(rank) * sizeof(RankArea));
}
[[gnu::always_inline]] inline Board::SlotHead& Board::head(std::uint32_t slot) const {
  return *reinterpret_cast<SlotHead*>(block_.data() + slots_at_ + slot * slot_bytes_);
}
[[gnu::always_inline]] inline Board::SlotRank& Board::slot_rank(std::uint32_t slot, int rank) const {
  return *reinterpret_cast<SlotRank*>(block_.data() + slots_at_ + slot * slot_bytes_ + sizeof(SlotHead) +
                                      static_cast<std::size_t>(rank) * sizeof(SlotRank));
}

std::uint64_t Board::tail() const { return header().tail.load(std::memory_order_seq_cst); }

std::uint64_t Board::read_position(int rank) const { return area(rank).read.load(std::memory_order_acquire); }

Board::SlowestReader Board::find_slowest() const {
  SlowestReader slowest{kNobody, header().tail.load(std::memory_order_relaxed)};
  for (int rank = 0; rank < ranks_; ++rank)
    if (area(rank).left.load(std::memory_order_acquire) == 0)
      if (const auto position = read_position(rank); position < slowest.position) slowest = {rank, position};
  return slowest;
}

void Board::copy_in(std::uint64_t at, std::span<const std::byte> bytes) {
  const std::size_t begin = at % kLogBytes;
  const std::size_t first = std::min(bytes.size(), kLogBytes - begin);
  std::memcpy(block_.data() + log_at_ + begin, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(block_.data() + log_at_, bytes.data() + first, bytes.size() - first);
}

void Board::copy_out(std::uint64_t at, std::span<std::byte> bytes) const {
  const std::size_t begin = at % kLogBytes;
  const std::size_t first = std::min(bytes.size(), kLogBytes - begin);
  std::memcpy(bytes.data(), block_.data() + log_at_ + begin, first);
  if (first < bytes.size()) std::memcpy(bytes.data() + first, block_.data() + log_at_, bytes.size() - first);
}

bool Board::is_unread(std::uint64_t bytes) {
  if (tail() - read_by_all_ <= bytes) return false;  // nobody reads backwards: what all had read then, all have read
  read_by_all_ = slowest_reader();
  return tail() - read_by_all_ > bytes;
}

bool Board::has_room(std::size_t bytes) {
  const std::size_t needed = sizeof(std::uint32_t) + bytes + kLogReserve;
  return needed <= kLogBytes && !is_unread(kLogBytes - needed);
}

void Board::append(std::span<const std::byte> record) {
  const std::uint64_t at = header().tail.load(std::memory_order_relaxed);
  const auto size = static_cast<std::uint32_t>(record.size());
  copy_in(at, std::as_bytes(std::span(&size, 1)));
  copy_in(at + sizeof size, record);
  position_ = at + sizeof size + size;
  area(self_).read.store(position_, std::memory_order_release);
  header().tail.store(position_, std::memory_order_seq_cst);
}

std::optional<Bytes> Board::read_next() {
  auto& read = area(self_).read;  // what was returned before has been acted on
  if (read.load(std::memory_order_relaxed) != position_) read.store(position_, std::memory_order_release);
  if (position_ == tail()) return std::nullopt;
  std::uint32_t size = 0;
  copy_out(position_, std::as_writable_bytes(std::span(&size, 1)));
  Bytes record(size);
  copy_out(position_ + sizeof size, record);
  position_ += sizeof size + size;
  return record;
}

/// Returns the slot's generation and arrivals once nobody has claimed the round, or the world has failed.
std::uint64_t Board::unclaimed(std::uint32_t slot) {
  const auto& word = head(slot).generation_and_arrivals;
  std::uint64_t now = 0;
  const auto is_unclaimed = [&] {
    now = word.load(std::memory_order_seq_cst);
    return (now & kClaimed) == 0;
  };
  if (wait_until(is_unclaimed, waits::kClaim, true) || wait_until(is_unclaimed, waits::kClaim, false)) return now;
  return wait_for_claimant(slot);
}

/// The same where the claimant has lost its core, or worse.
std::uint64_t Board::wait_for_claimant(std::uint32_t slot) {
  const auto& word = head(slot).generation_and_arrivals;
  PatientWait wait = make_wait(PatientWait::kWrites);
  while (true) {
    const std::uint64_t now = word.load(std::memory_order_seq_cst);
    const int claimant = claimant_of(now);
    lock_.await(claimant);  // which this rank may have meanwhile
    if (claimant == kNobody || !wait.pause(claimant)) {
      lock_.await(kNobody);
      return now;
    }
  }
}

bool Board::await_unclaimed(std::uint32_t slot) { return (unclaimed(slot) & kClaimed) == 0; }

int Board::claimant(std::uint32_t slot) const { return claimant_of(head(slot).generation_and_arrivals.load(std::memory_order_acquire)); }

void Board::prepare_arrival(std::uint32_t slot) const {
  prefetch_to_write(&head(slot));
  const auto* const mine = reinterpret_cast<const std::byte*>(&slot_rank(slot, self_));
  prefetch_to_write(mine);
  prefetch_to_write(mine + 64);
}

bool Board::expect_to_be_last(std::uint32_t slot, std::span<const int> indices) const {
  if (arrivals(slot) + 1 != indices.size()) return false;
  for (const int index : indices) {
    if (index == self_) continue;
    const SlotRank& other = slot_rank(slot, index);
    __builtin_prefetch(&other);
    __builtin_prefetch(reinterpret_cast<const std::byte*>(&other) + 64);
  }
  return true;
}

bool Board::arrive_last(std::uint32_t slot, std::uint32_t generation, std::uint32_t ranks) {
  SlotHead& place = head(slot);
  SlotRank& mine = slot_rank(slot, self_);
  mine.arrived_round.store(place.round.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  std::uint64_t now = std::uint64_t{generation} << 32 | (ranks - 1);
  return place.generation_and_arrivals.compare_exchange_strong(now, (now + 1) | claimed_by(self_), std::memory_order_seq_cst);
}

std::uint32_t Board::arrive(std::uint32_t slot, std::uint32_t generation) {
  SlotHead& place = head(slot);
  SlotRank& mine = slot_rank(slot, self_);
  while (true) {
    std::uint64_t now = unclaimed(slot);
    if (static_cast<std::uint32_t>(now >> 32) != generation) {
      mine.arrived_round.store(0, std::memory_order_relaxed);
      return 0;
    }
    mine.arrived_round.store(place.round.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (place.generation_and_arrivals.compare_exchange_weak(now, now + 1, std::memory_order_seq_cst, std::memory_order_acquire))
      return static_cast<std::uint32_t>((now + 1) & kArrivals);
  }
}

bool Board::claim(std::uint32_t slot, std::uint32_t generation, std::uint32_t arrived) {
  std::uint64_t now = std::uint64_t{generation} << 32 | arrived;
  return head(slot).generation_and_arrivals.compare_exchange_strong(now, now | claimed_by(self_), std::memory_order_acq_rel);
}

std::uint32_t Board::arrivals(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(head(slot).generation_and_arrivals.load(std::memory_order_seq_cst) & kArrivals);
}
std::uint32_t Board::generation(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(head(slot).generation_and_arrivals.load(std::memory_order_acquire) >> 32);
}

void Board::reset_arrivals(std::uint32_t slot, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    auto& round = head(slot + i).round;                                                 // nobody else writes it while the round is claimed
    round.store(round.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // after the results that have been given
  }
  SlotHead& place = head(slot);
  const std::uint64_t now = place.generation_and_arrivals.load(std::memory_order_relaxed);
  place.generation_and_arrivals.store(now >> 32 << 32, std::memory_order_release);
}

bool Board::evict(std::uint32_t slot) {
  auto& word = head(slot).generation_and_arrivals;
  std::uint64_t now = word.load(std::memory_order_acquire);
  if (static_cast<std::uint32_t>(now) != 0) return false;
  return word.compare_exchange_strong(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel);
}

void Board::set_location(std::uint32_t slot, std::uint64_t location) {
  static_cast<void>(unclaimed(slot));  // the round is the one that this rank is going to arrive in
  const std::uint64_t round = head(slot).round.load(std::memory_order_relaxed);
  slot_rank(slot, self_).locations[round % 2].store(location, std::memory_order_relaxed);
}
void Board::keep_location(std::uint32_t slot, std::uint64_t location) {
  auto& word = slot_rank(slot, self_).locations[head(slot).round.load(std::memory_order_relaxed) % 2];
  if (word.load(std::memory_order_relaxed) != location) word.store(location, std::memory_order_relaxed);
}
std::span<std::byte, Board::kNoteBytes> Board::note(std::uint32_t slot, int rank) const { return slot_rank(slot, rank).note; }
std::uint64_t Board::coming_location(std::uint32_t slot, int rank) const {
  const std::uint64_t round = head(slot).round.load(std::memory_order_relaxed);
  return slot_rank(slot, rank).locations[round % 2].load(std::memory_order_relaxed);
}
std::uint64_t Board::location(std::uint32_t slot, int rank) const {
  const std::uint64_t round = head(slot).round.load(std::memory_order_relaxed);
  return slot_rank(slot, rank).locations[(round + 1) % 2].load(std::memory_order_relaxed);
}
bool Board::has_arrived_too(std::uint32_t slot, int rank) const {
  return slot_rank(slot, rank).arrived_round.load(std::memory_order_relaxed) >=
         slot_rank(slot, self_).arrived_round.load(std::memory_order_relaxed);
}

bool Board::has_arrived(std::uint32_t slot, int rank) const {
  return slot_rank(slot, rank).arrived_round.load(std::memory_order_relaxed) == head(slot).round.load(std::memory_order_acquire) + 1;
}
void Board::set_stuck(std::uint32_t slot) {
  header().stuck_marks.fetch_add(1, std::memory_order_relaxed);
  slot_rank(slot, self_).stuck_round.store(slot_rank(slot, self_).arrived_round.load(std::memory_order_relaxed), std::memory_order_relaxed);
}
std::uint64_t Board::stuck_marks() const { return header().stuck_marks.load(std::memory_order_relaxed); }
bool Board::is_stuck(std::uint32_t slot, int rank, bool said) const {
  const std::uint64_t round = head(slot).round.load(std::memory_order_relaxed) + (said ? 0 : 1);
  const SlotRank& of_rank = slot_rank(slot, rank);
  return of_rank.arrived_round.load(std::memory_order_relaxed) == round && of_rank.stuck_round.load(std::memory_order_relaxed) == round;
}

void Board::set_blocked(std::uint32_t slots) {
  auto& blocked = area(self_).blocked;
  if (blocked.load(std::memory_order_relaxed) != slots) blocked.store(slots, std::memory_order_release);
}
std::uint32_t Board::blocked(int rank) const { return area(rank).blocked.load(std::memory_order_acquire); }

void Board::void_slot(std::uint32_t slot, std::uint32_t count) {
  // The generation first: who arrives in between finds it over, and is not taken to have arrived in the next round.
  auto& word = head(slot).generation_and_arrivals;
  std::uint64_t now = unclaimed(slot);
  while (!word.compare_exchange_weak(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel)) now = unclaimed(slot);
  for (std::uint32_t i = 0; i < count; ++i) head(slot + i).round.fetch_add(1, std::memory_order_relaxed);
}

void Board::close_slot(std::uint32_t slot) {
  auto& word = head(slot).generation_and_arrivals;
  std::uint64_t now = unclaimed(slot);
  while (!word.compare_exchange_weak(now, ((now >> 32) + 1) << 32, std::memory_order_acq_rel)) now = unclaimed(slot);
}

void Board::give_results(std::uint32_t slot, std::span<const int> indices, Company company) {
  const std::uint64_t round = head(slot).round.load(std::memory_order_relaxed) + 1;  // as in `arrived_round`
  const std::uint64_t result = round << kCompanyBits | static_cast<std::uint64_t>(company);
  for (const int index : indices) slot_rank(slot, index).result_round.store(result, std::memory_order_release);
}
bool Board::is_to_claim(std::uint32_t slot, std::size_t ranks) const {
  return (head(slot).generation_and_arrivals.load(std::memory_order_seq_cst) & (kClaimed | kArrivals)) == ranks;
}
bool Board::has_result(std::uint32_t slot) const {
  const SlotRank& mine = slot_rank(slot, self_);
  const std::uint64_t round = mine.result_round.load(std::memory_order_acquire) >> kCompanyBits;
  return round != 0 && round == mine.arrived_round.load(std::memory_order_relaxed);
}
Board::Company Board::take_result(std::uint32_t slot) {
  auto& result = slot_rank(slot, self_).result_round;
  const auto company = static_cast<Company>(result.load(std::memory_order_relaxed) & ((1U << kCompanyBits) - 1));
  result.store(0, std::memory_order_release);
  return company;
}
bool Board::are_results_taken(std::uint32_t slot) const {
  for (int rank = 0; rank < ranks_; ++rank)
    if (slot_rank(slot, rank).result_round.load(std::memory_order_acquire) != 0) return false;
  return true;
}

void Board::promise(std::uint32_t slot) {
  head(slot).promised_round.store(head(slot).round.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}
void Board::take_promise_back(std::uint32_t slot) { head(slot).promised_round.store(0, std::memory_order_release); }
bool Board::is_promised(std::uint32_t slot) const {
  return head(slot).promised_round.load(std::memory_order_acquire) == head(slot).round.load(std::memory_order_relaxed) + 1;
}

void Board::set_leader_looks(bool looks) {
  header().leader_looks.store(looks ? 1 : 0, std::memory_order_relaxed);
  full_fence();  // between that and the last look, as in `leader_looks`
}
bool Board::leader_looks() const {
  full_fence();
  return header().leader_looks.load(std::memory_order_relaxed) != 0;
}

BatchState& Board::batch(std::uint64_t sequence) const { return header().batches[sequence % kBatchPlaces]; }

std::vector<std::uint64_t> Board::find_places(std::size_t count) const {
  std::vector<std::uint64_t> sequences;
  for (std::uint32_t i = 0; i < kBatchPlaces && sequences.size() < count; ++i) {
    const std::uint64_t place = (header().next_place + i) % kBatchPlaces;
    const BatchState& state = header().batches[place];
    if (state.taken.load(std::memory_order_acquire)) continue;
    // The next number after the last that had this place; 0 is none.
    const std::uint64_t last = state.sequence.load(std::memory_order_relaxed);
    sequences.push_back(last != 0 || place == 0 ? last + kBatchPlaces : place);
  }
  if (sequences.size() < count) sequences.clear();
  return sequences;
}

void Board::open_batch(std::uint64_t sequence, std::uint32_t group) {
  BatchState& state = batch(sequence);
  if (state.taken.load(std::memory_order_acquire)) throw BackendError("a batch for a place that another has");
  state.sequence.store(sequence, std::memory_order_relaxed);
  state.next_chunk.store(0, std::memory_order_relaxed);
  state.finished.store(0, std::memory_order_relaxed);
  state.complete.store(false, std::memory_order_relaxed);
  state.retired.store(false, std::memory_order_relaxed);
  state.departed.store(0, std::memory_order_relaxed);
  state.taken.store(true, std::memory_order_release);
  ++header().open_batches[group % kOpenCounts];
  header().next_place = static_cast<std::uint32_t>((sequence + 1) % kBatchPlaces);
}
std::uint32_t Board::open_batches(std::uint32_t group) const { return header().open_batches[group % kOpenCounts]; }

bool Board::retire_batch(std::uint64_t sequence, std::uint32_t group) {
  if (batch(sequence).retired.exchange(true, std::memory_order_acq_rel)) return false;
  --header().open_batches[group % kOpenCounts];
  return true;
}

bool Board::is_over(std::uint64_t sequence) const {
  const BatchState& state = batch(sequence);
  return !state.taken.load(std::memory_order_acquire) || state.sequence.load(std::memory_order_relaxed) != sequence;
}

void Board::depart(std::uint64_t sequence, std::uint32_t members) {
  BatchState& state = batch(sequence);
  if (state.departed.fetch_add(1, std::memory_order_acq_rel) + 1 == members) state.taken.store(false, std::memory_order_release);
}

FutexWord& Board::wait_doorbell() const { return header().wait_doorbell; }
void Board::ring_waiters() { ring(header().wait_doorbell, header().wait_sleepers); }
Board::Watcher::Watcher(const Board& board) : watchers_(board.header().watchers) {
  watchers_.fetch_add(1, std::memory_order_seq_cst);
  full_fence();  // between that and the look for results, as in `ring_watchers`
}
Board::Watcher::~Watcher() { watchers_.fetch_sub(1, std::memory_order_relaxed); }
bool Board::has_watchers() const {
  full_fence();  // between what came and the look: a watcher counts itself, then looks for it
  return header().watchers.load(std::memory_order_relaxed) > 0;
}
void Board::ring_watchers() {
  if (has_watchers()) ring_waiters();
}
void Board::sleep_waiting(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  sleep_on(header().wait_doorbell, header().wait_sleepers, seen, timeout);
}
FutexWord& Board::work_doorbell(int rank) const { return area(rank).work_doorbell; }
void Board::ring_worker(int rank) { ring(area(rank).work_doorbell, area(rank).work_sleepers); }
void Board::ring_all_workers() {
  for (int rank = 0; rank < ranks_; ++rank) ring_worker(rank);
}
void Board::sleep_working(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  sleep_on(area(self_).work_doorbell, area(self_).work_sleepers, seen, timeout);
}

void Board::begin_life() {
  pthread_mutex_lock(&area(self_).alive);
  area(self_).born.store(1, std::memory_order_release);
}
void Board::end_life() {
  area(self_).left.store(1, std::memory_order_release);
  pthread_mutex_unlock(&area(self_).alive);
}

std::optional<int> Board::find_dead() {
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != self_ && is_dead(rank)) return rank;
  return std::nullopt;
}

bool Board::is_dead(int rank) {
  RankArea& other = area(rank);
  if (other.dead.load(std::memory_order_acquire) != 0) return true;
  if (other.born.load(std::memory_order_acquire) == 0 || other.left.load(std::memory_order_acquire) != 0) return false;
  const int result = pthread_mutex_trylock(&other.alive);
  // Noted, for it shows only once: unlocking makes it ENOTRECOVERABLE, and glibc's trylock, which says so, keeps it locked for good.
  if (result == EOWNERDEAD || result == ENOTRECOVERABLE) other.dead.store(1, std::memory_order_release);
  if (result == EOWNERDEAD || result == 0) pthread_mutex_unlock(&other.alive);  // 0: it left between the two looks
  return result == EOWNERDEAD || result == ENOTRECOVERABLE;
}

void Board::leave() { area(self_).left.store(1, std::memory_order_release); }
bool Board::all_left() const {
  for (int rank = 0; rank < ranks_; ++rank)
    if (area(rank).left.load(std::memory_order_acquire) == 0) return false;
  return true;
}

void Board::set_failure(const Status& status) {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failed()) return;
    RankArea& own = area(self_);
    own.failure_code = status.code();
    const std::size_t length = std::min(status.text().size(), own.failure_text.size() - 1);
    std::copy_n(status.text().data(), length, own.failure_text.data());
    own.failure_text[length] = '\0';
    int expected = board_layout::kNoFailure;
    if (!header().first_failure.compare_exchange_strong(expected, self_, std::memory_order_acq_rel)) return;
  }
  ring_waiters();
  ring_all_workers();
}
bool Board::failed() const { return header().first_failure.load(std::memory_order_acquire) != board_layout::kNoFailure; }
Status Board::failure() const {
  const int rank = header().first_failure.load(std::memory_order_acquire);
  if (rank == board_layout::kNoFailure) return {};
  return {area(rank).failure_code, area(rank).failure_text.data()};
}

}  // namespace hvd
