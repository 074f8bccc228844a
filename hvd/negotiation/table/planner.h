#pragma once
/// The planner decides which agreed tensors travel together. A pure function of the queue and the
/// threshold, so that every rank that has read the same log computes the same batches; nothing of
/// the plan is ever sent.

#include <cstdint>
#include <deque>
#include <vector>

#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// A submission that all its ranks have made, waiting to be cut into a batch.
struct AgreedUnit {
  std::uint32_t id = 0;
  int process_set = 0;
  SharedSignature
      signature;  ///< of the set's first rank; equal on all but for first dimensions of gathers
  std::vector<bool> present;  ///< per tensor: some rank has it; the others do not travel
  std::vector<std::int64_t> total_bytes;  ///< per tensor: bytes that count against the threshold
  std::vector<int> absent;                ///< global ranks of the set that have joined, ascending
};

struct PlannedTensor {
  std::uint32_t unit = 0;
  std::uint32_t index = 0;  ///< of the tensor in its unit
};

/// Tensors of one kind, dtype, reduce op, scales, root, device kind and process set.
struct PlannedBatch {
  int process_set = 0;
  DataType dtype = DataType::Float32;
  SharedSignature signature;  ///< for the fields that all its tensors share
  std::vector<PlannedTensor> tensors;
  std::int64_t bytes = 0;
  std::vector<int> absent = {};  ///< as of its units
};

/// Takes from the front of `queue` the first unit, however large, and, in order, those that can
/// travel with it, up to the first that would make it more than `threshold_bytes`, or the queue's
/// end (0: no fusion beyond a unit's own tensors). `groups_alone`:
/// units of several tensors travel with no other unit. Returns one batch per dtype; none if nobody
/// had anything to say.
std::vector<PlannedBatch> cut(std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes,
                              bool groups_alone = false);

/// Returns how many batches `cut` would return, and changes nothing.
std::size_t count_batches(const std::deque<AgreedUnit>& queue, std::uint64_t threshold_bytes,
                          bool groups_alone = false);

}  // namespace hvd
