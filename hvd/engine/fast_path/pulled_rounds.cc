#include "hvd/engine/fast_path/pulled_rounds.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace hvd {

namespace {

using Words = std::array<std::uint64_t, SlotMemory::kMostPullers>;
static_assert(sizeof(Words) <= Rounds::kNoteBytes &&
              SlotMemory::kMostPullers == limit(Limit::LentRanks));

constexpr std::uint32_t kNobodyKnows = ~std::uint32_t{0};  // as many readers as never come

}  // namespace

/// Returns whether the others get anything from the rank of the set.
bool PulledRounds::is_read(const RepeatedOp& op, int rank) const {
  return op.traits.kind != OpKind::Broadcast || op.traits.root == rank;
}

bool PulledRounds::begin(RepeatedOp& op) const {
  let_go(op);  // of a result that nobody has fetched
  const bool is_source = is_read(op, rank_);
  const auto location = op.slots->lend(is_source ? op.input_bytes : 0);
  if (!location) return false;
  op.location = *location;
  op.block = is_source ? op.slots->kept(board_.self(), *location) : nullptr;
  op.is_lent = true;
  return true;
}

bool PulledRounds::have_all_begun(const RepeatedOp& op) const {
  return std::ranges::all_of(op.indices, [&](int index) {
    return op.slots->is_lent(board_.rounds().coming_location(op.unit.id, index));
  });
}

void PulledRounds::tell(const RepeatedOp& op) const {
  Words words{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < op.indices.size(); ++i)
    if (is_read(op, op.set->ranks[i]))
      words[count++] = board_.rounds().coming_location(op.unit.id, op.indices[i]);
  for (const int index : op.indices)
    std::memcpy(board_.rounds().note(op.unit.id, index).data(), words.data(),
                count * sizeof(std::uint64_t));
}

void PulledRounds::find_sources(RepeatedOp& op) const {
  Words words{};
  std::memcpy(words.data(), board_.rounds().note(op.unit.id, board_.self()).data(), sizeof words);
  std::size_t count = 0;
  for (std::size_t i = 0; i < op.indices.size(); ++i)
    if (is_read(op, op.set->ranks[i]))
      op.sources.push_back(op.slots->kept(op.indices[i], words[count++]));
  op.slots->take_back(op.location, static_cast<std::uint32_t>(op.indices.size()));
  op.is_lent = false;
}

void PulledRounds::pull(RepeatedOp& op, void* output) {
  if (output != nullptr) op.slots->pull(op.traits, op.count, op.sources, op.parts, output);
  let_go(op);
}

void PulledRounds::let_go(RepeatedOp& op) {
  if (op.sources.empty()) return;
  op.slots->finish_reading(op.sources);
  op.sources.clear();
}

void PulledRounds::end(RepeatedOp& op, bool is_open) const {
  if (!std::exchange(op.is_lent, false)) return;
  op.slots->take_back(op.location, is_open ? kNobodyKnows : 0);
}

}  // namespace hvd
