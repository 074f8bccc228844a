#include "hvd/engine/fast_path/round_work.h"

#include <cstring>

namespace hvd {

Rounds::Company company_of(std::size_t place, std::size_t count) {
  if (count < 2) return Rounds::Company::Alone;
  return place == 0 ? Rounds::Company::First : Rounds::Company::Rest;
}

bool share_batch(const RepeatedOp& one, const RepeatedOp& other) {
  return one.set->id == other.set->id && one.memory == other.memory;
}

RoundWork::RoundWork(const EngineParts& parts, NegotiationLog& log)
    : board_(*parts.board), log_(log), pulled_(board_, parts.topology.rank) {
  blocks_.reserve(static_cast<std::size_t>(board_.ranks()));
}

bool RoundWork::is_valid(RepeatedOp& op) {
  if (op.judged_at == board_.log().read_position())
    return op.verdict != RepeatedOp::Verdict::Invalid;
  op.judged_at = board_.log().read_position();
  op.verdict = RepeatedOp::Verdict::Invalid;
  const int set = op.set->id;
  if (!log_.table().sets().has(set) || !log_.table().sets().joined(set).empty() ||
      log_.table().any_left() || !log_.table().knows(op.unit.id))
    return false;
  const Unit& unit = log_.table().unit(op.unit.id);
  if (unit.generation != op.unit.generation) return false;
  // With one signature for all there is nothing to disagree about, and no number of rows to tell.
  if (unit.signatures.of(static_cast<std::size_t>(op.set->rank)) != op.signature) return false;
  const bool all_same =
      unit.signatures.all_say({0, static_cast<int>(op.set->ranks.size())}, op.signature);
  op.verdict = all_same ? RepeatedOp::Verdict::AllSame : RepeatedOp::Verdict::Valid;
  return true;
}

bool RoundWork::is_possible(RepeatedOp& op) {
  // What another has said since this rank has read, negotiation deals with. From the claim on
  // nobody says anything of the unit.
  if (!is_valid(op) || op.verdict != RepeatedOp::Verdict::AllSame ||
      board_.log().tail() != board_.log().read_position())
    return false;
  return find_blocks(op);
}

bool RoundWork::find_blocks(const RepeatedOp& op) {
  if (op.is_pulled()) return pulled_.have_all_begun(op);
  const std::uint32_t unit = op.unit.id;
  blocks_.clear();
  for (const int index : op.indices) {
    const std::uint64_t location = board_.rounds().coming_location(unit, index);
    const bool is_own = location == op.location && index == board_.self();
    std::byte* const block = is_own                 ? op.own_block()
                             : op.memory != nullptr ? op.memory->kept(index, location)
                                                    : nullptr;
    // it is negotiated
    if (op.memory != nullptr ? block == nullptr : location != kNoBlock) return false;
    const bool is_inline = op.note != nullptr && !op.is_in_place;
    blocks_.push_back(is_inline ? board_.rounds().note(unit, index).data() : block);
  }
  return true;
}

std::span<const std::byte* const> RoundWork::inputs(const RepeatedOp& op) {
  if (!op.is_in_place) return blocks_;
  input_ = static_cast<const std::byte*>(op.input);
  return {&input_, 1};
}

bool RoundWork::claim(const RepeatedOp& op) {
  return board_.rounds().claim(op.unit.id, op.unit.generation,
                               static_cast<std::uint32_t>(op.indices.size()));
}

void RoundWork::run(const RepeatedOp& op) {
  if (op.is_pulled()) {
    pulled_.tell(op);
  } else if (op.memory != nullptr) {
    op.slots->run_for_all(op.traits, op.count, blocks_, op.parts);
  }
}

void RoundWork::end(const RepeatedOp& op, Rounds::Company company) {
  board_.rounds().give_results(op.unit.id, op.indices, company);
  board_.rounds().reset_arrivals(op.unit.id, 1);
}

void RoundWork::copy_result(RepeatedOp& op) {
  // The inline data is not the operation's own: it may belong to the next one before the caller has
  // fetched the result.
  void* const output = op.is_to_fetch ? op.block + op.result_at : op.output;
  const std::byte* const result = (op.note != nullptr ? op.note : op.block) + op.result_at;
  for (const auto& member : op.group)
    if (member.bytes > 0) std::memcpy(member.output, result + member.at, member.bytes);
  if (op.group.empty() && op.result_bytes > 0 && output != result)
    std::memcpy(output, result, op.result_bytes);
}

}  // namespace hvd
