#include "hvd/negotiation/values/unit.h"

#include <algorithm>
#include <iterator>

#include "hvd/base/text.h"
#include "hvd/base/wire.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

Status judge(const Unit& unit, const ProcessSetInfo& set, const std::vector<int>& absent) {
  std::vector<int> ranks;
  std::vector<SharedSignature> signatures;
  const auto& all = set.ranks;
  const auto& said = unit.signatures.said();
  if (absent.empty() && said.size() == 1 &&
      said.front().places == Run{0, static_cast<int>(all.size())})
    return {};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::binary_search(absent.begin(), absent.end(), all[i])) continue;
    const SharedSignature& signature = unit.signatures.of(i);
    if (!signature)
      return {Status::Code::BackendError,
              "a tensor was agreed before every rank had introduced it"};
    ranks.push_back(all[i]);
    signatures.push_back(signature);
  }
  if (ranks.empty())
    return {Status::Code::BackendError, "a tensor was agreed that no rank has submitted"};
  Status status = verdict(display_name(unit.key.name), ranks, signatures);
  if (!status.ok() || absent.empty()) return status;
  // The values of those who have joined count as zeros; where there is none, they are missed.
  if (unit.key.kind == OpKind::Barrier || unit.key.kind == OpKind::Allreduce) return {};
  return {Status::Code::Joined,
          formatted("{} '{}': rank{} {} {} joined and cannot take part", name_of(unit.key.kind),
                    display_name(unit.key.name), absent.size() == 1 ? "" : "s", rank_list(absent),
                    absent.size() == 1 ? "has" : "have")};
}

std::vector<std::int64_t> total_bytes(const Unit& unit, const Signature& first) {
  std::vector<std::int64_t> bytes;
  const bool gathers = unit.key.kind == OpKind::Allgather || unit.key.kind == OpKind::Alltoall;
  for (std::size_t i = 0; i < first.tensors.size(); ++i) {
    std::int64_t elements = 0;
    if (gathers) {
      for (const auto& [places, signature] : unit.signatures.said())
        elements += places.count * element_count(signature->tensors[i].shape);
    } else {
      elements = element_count(first.tensors[i].shape);
    }
    bytes.push_back(elements * static_cast<std::int64_t>(element_bytes(first.tensors[i].dtype)));
  }
  return bytes;
}

SlotRanges::SlotRanges(std::uint32_t count) { free_[0] = count; }

std::optional<std::uint32_t> SlotRanges::find(std::uint32_t count) const {
  for (const auto& [first, length] : free_)
    if (length >= count) return first;
  return std::nullopt;
}

void SlotRanges::take(std::uint32_t first, std::uint32_t count) {
  const auto range = free_.find(first);
  if (range == free_.end() || range->second < count)
    throw WireError("introduction of a slot that is not free");
  const auto rest = range->second - count;
  free_.erase(range);
  if (rest > 0) free_[first + count] = rest;
}

void SlotRanges::give_back(std::uint32_t first, std::uint32_t count) {
  const auto range = free_.emplace(first, count).first;
  if (const auto next = std::next(range);
      next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second != range->first) return;
  previous->second += range->second;
  free_.erase(range);
}

}  // namespace hvd
