#include "hvd/negotiation/planner.h"

#include <algorithm>
#include <numeric>

namespace hvd {

namespace {

bool can_fuse(const AgreedUnit& a, const AgreedUnit& b) {
  const Signature& left = *a.signature;
  const Signature& right = *b.signature;
  return a.process_set == b.process_set && a.absent == b.absent && left.kind == right.kind && left.op == right.op &&
         left.device == right.device && left.root == right.root && left.prescale_factor == right.prescale_factor &&
         left.postscale_factor == right.postscale_factor;
}

std::int64_t bytes_of(const AgreedUnit& unit) { return std::accumulate(unit.total_bytes.begin(), unit.total_bytes.end(), std::int64_t{0}); }

void add(std::vector<PlannedBatch>& batches, const AgreedUnit& unit) {
  for (std::uint32_t i = 0; i < unit.signature->tensors.size(); ++i) {
    if (!unit.present[i]) continue;
    const DataType dtype = unit.signature->tensors[i].dtype;
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const auto& known) { return known.dtype == dtype; });
    if (batch == batches.end()) batch = batches.insert(batches.end(), {unit.process_set, dtype, unit.signature, {}, 0, unit.absent});
    batch->tensors.push_back({unit.id, i});
    batch->bytes += unit.total_bytes[i];
  }
}

}  // namespace

std::vector<PlannedBatch> cut(std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes, bool groups_alone) {
  std::vector<PlannedBatch> batches;
  if (queue.empty()) return batches;
  const AgreedUnit first = std::move(queue.front());
  queue.pop_front();
  add(batches, first);
  const auto alone = [&](const AgreedUnit& unit) { return groups_alone && unit.signature->tensors.size() > 1; };
  if (first.signature->kind == OpKind::Barrier || alone(first)) return batches;
  auto total = static_cast<std::uint64_t>(bytes_of(first));
  for (auto next = queue.begin(); next != queue.end();) {
    const auto bytes = static_cast<std::uint64_t>(bytes_of(*next));
    if (!can_fuse(first, *next) || alone(*next)) {
      ++next;
      continue;
    }
    if (total + bytes > threshold_bytes) break;
    total += bytes;
    add(batches, *next);
    next = queue.erase(next);
  }
  return batches;
}

}  // namespace hvd
