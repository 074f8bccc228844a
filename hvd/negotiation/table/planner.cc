#include "hvd/negotiation/table/planner.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace hvd {

namespace {

bool can_fuse(const AgreedUnit& a, const AgreedUnit& b) {
  const Signature& left = *a.signature;
  const Signature& right = *b.signature;
  const OperationTerms& terms = left;
  return a.process_set == b.process_set && a.absent == b.absent && left.device == right.device &&
         terms == right;
}

std::int64_t bytes_of(const AgreedUnit& unit) {
  return std::accumulate(unit.total_bytes.begin(), unit.total_bytes.end(), std::int64_t{0});
}

void add(std::vector<PlannedBatch>& batches, const AgreedUnit& unit) {
  for (std::uint32_t i = 0; i < unit.signature->tensors.size(); ++i) {
    if (!unit.present[i]) continue;
    const DataType dtype = unit.signature->tensors[i].dtype;
    auto batch = std::find_if(batches.begin(), batches.end(),
                              [&](const auto& known) { return known.dtype == dtype; });
    if (batch == batches.end())
      batch = batches.insert(batches.end(),
                             {unit.process_set, dtype, unit.signature, {}, 0, unit.absent});
    batch->tensors.push_back({unit.id, i});
    batch->bytes += unit.total_bytes[i];
  }
}

/// Calls `take` for the units that travel together, the first of the queue among them, by their
/// places there, ascending.
template <class Take>
void select(const std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes, bool groups_alone,
            Take take) {
  if (queue.empty()) return;
  const AgreedUnit& first = queue.front();
  take(std::size_t{0});
  const auto alone = [&](const AgreedUnit& unit) {
    return groups_alone && unit.signature->tensors.size() > 1;
  };
  if (first.signature->kind == OpKind::Barrier || alone(first)) return;
  auto total = static_cast<std::uint64_t>(bytes_of(first));
  for (std::size_t place = 1; place < queue.size(); ++place) {
    const AgreedUnit& next = queue[place];
    if (!can_fuse(first, next) || alone(next)) continue;
    const auto bytes = static_cast<std::uint64_t>(bytes_of(next));
    if (threshold_bytes == 0 || total + bytes > threshold_bytes) return;
    total += bytes;
    take(place);
  }
}

}  // namespace

std::vector<PlannedBatch> cut(std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes,
                              bool groups_alone) {
  std::vector<PlannedBatch> batches;
  std::vector<std::size_t> taken;
  select(queue, threshold_bytes, groups_alone, [&](std::size_t place) {
    taken.push_back(place);
    add(batches, queue[place]);
  });
  if (taken.size() == 1) {
    queue.pop_front();
  } else if (!taken.empty()) {
    std::deque<AgreedUnit> left;
    std::size_t next = 0;
    for (std::size_t place = 0; place < queue.size(); ++place) {
      if (next < taken.size() && taken[next] == place) {
        ++next;
      } else {
        left.push_back(std::move(queue[place]));
      }
    }
    queue = std::move(left);
  }
  return batches;
}

std::size_t count_batches(const std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes,
                          bool groups_alone) {
  std::uint32_t dtypes = 0;
  static_assert(kDataTypes <= 32);
  select(queue, threshold_bytes, groups_alone, [&](std::size_t place) {
    const AgreedUnit& unit = queue[place];
    for (std::size_t i = 0; i < unit.present.size(); ++i)
      if (unit.present[i]) dtypes |= 1U << static_cast<unsigned>(unit.signature->tensors[i].dtype);
  });
  return static_cast<std::size_t>(std::popcount(dtypes));
}

}  // namespace hvd
