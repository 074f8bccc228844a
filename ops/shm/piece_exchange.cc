#include "ops/shm/piece_exchange.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "hvd/base/cpu.h"

namespace hvd {

namespace {

constexpr auto kPatienceToTake = std::chrono::microseconds(20);   // a piece takes a rank that has a core less
constexpr auto kPatienceToGive = std::chrono::microseconds(100);  // as long as to fall asleep and be woken takes
constexpr int kTurns = 20;  // with which the core is offered instead, and in which others fill and empty rings
constexpr int kTurnsInVain = 2;
constexpr auto kPatienceOffered = std::chrono::milliseconds(4);

}  // namespace

bool PieceExchange::wait(Clock::duration patience, int turns) {
  const auto now = Clock::now();
  if (turns_++ == 0) waited_since_ = now;
  if (have_cores_) {
    cpu_relax();
    return now - waited_since_ < patience;
  }
  if (turns_ > turns || now - waited_since_ >= kPatienceOffered) return false;
  std::this_thread::yield();  // the one awaited may be the next to run here
  return true;
}

bool PieceExchange::give_some() {
  bool any = false;
  for (auto& [relay, memory, next] : outgoing_) any = relay->give(memory, next) || any;
  return any;
}

bool PieceExchange::take_some() {
  bool any = false;
  for (const auto& [relay, to, source, skipped, reader] : incoming_) any = relay->take(reader, to, past_caches_) || any;
  return any;
}

bool PieceExchange::take_all(const Read& read) {
  bool waits = true;  // not for ranks that have just been waited for in vain
  moved();
  while (true) {
    const bool gave = give_some();
    const bool took = take_some();
    if (gave || took) moved();
    waits = waits || took;
    if (took) continue;
    const auto next = std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& in) { return !in.is_done(); });
    if (next == incoming_.end()) return true;
    if (gave || (waits ? wait(kPatienceToTake, kTurns) : !have_cores_ && wait({}, kTurnsInVain))) continue;
    waits = false;
    moved();
    const auto piece = next->relay->taken_by(next->reader);
    const std::size_t skipped = next->skipped + static_cast<std::size_t>(piece) * Relay::kPieceBytes;
    if (!read(next->source, skipped, Relay::part_of(next->to, piece))) return false;
    next->relay->skip(next->reader);
    std::rotate(incoming_.begin(), next + 1, incoming_.end());
  }
}

bool PieceExchange::give_rest() {
  std::uint64_t before = 0;
  moved();
  while (true) {
    std::uint64_t taken = 0;
    bool all = true;
    for (const auto& [relay, memory, next] : outgoing_) {
      taken += relay->taken();
      all = all && relay->taken_by_all() >= Relay::pieces_of(memory.size());
    }
    if (all) return true;
    if (give_some() || taken != std::exchange(before, taken)) {
      moved();
    } else if (!wait(kPatienceToGive, kTurns)) {
      return std::all_of(outgoing_.begin(), outgoing_.end(),
                         [](const Outgoing& out) { return out.memory.empty() || out.relay->taken_by_all() > 0; });
    }
  }
}

}  // namespace hvd
