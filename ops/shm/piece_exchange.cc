#include "ops/shm/piece_exchange.h"

#include <algorithm>
#include <utility>

namespace hvd {

bool PieceExchange::give_some() {
  bool any = false;
  for (auto& [relay, memory, next] : outgoing_) any = relay->give(memory, next) || any;
  return any;
}

bool PieceExchange::take_some() {
  bool any = false;
  for (const auto& [relay, to, source, skipped, reader] : incoming_)
    any = relay->take(reader, to, past_caches_) || any;
  return any;
}

bool PieceExchange::take_all(const Read& read) {
  bool waits_for_it = true;  // not for ranks that have just been waited for in vain
  pauses_.again();
  while (true) {
    const bool gave = give_some();
    const bool took = take_some();
    if (gave || took) pauses_.again();
    waits_for_it = waits_for_it || took;
    if (took) continue;
    const auto next = std::find_if(incoming_.begin(), incoming_.end(),
                                   [](const Incoming& in) { return !in.is_done(); });
    if (next == incoming_.end()) return true;
    if (gave || pauses_.pause(waits_for_it ? waits::kPieceToTake : waits::kPieceInVain)) continue;
    waits_for_it = false;
    pauses_.again();
    const auto piece = next->relay->taken_by(next->reader);
    const std::size_t skipped =
        next->skipped + static_cast<std::size_t>(piece) * Relay::kPieceBytes;
    if (!read(next->source, skipped, Relay::part_of(next->to, piece))) return false;
    next->relay->skip(next->reader);
    std::rotate(incoming_.begin(), next + 1, incoming_.end());
  }
}

bool PieceExchange::give_rest() {
  std::uint64_t before = 0;
  pauses_.again();
  while (true) {
    std::uint64_t taken = 0;
    bool all = true;
    for (const auto& [relay, memory, next] : outgoing_) {
      taken += relay->taken();
      all = all && relay->taken_by_all() >= Relay::pieces_of(memory.size());
    }
    if (all) return true;
    if (give_some() || taken != std::exchange(before, taken)) {
      pauses_.again();
    } else if (!pauses_.pause(waits::kPieceToGive)) {
      return std::all_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& out) {
        return out.memory.empty() || out.relay->taken_by_all() > 0;
      });
    }
  }
}

}  // namespace hvd
