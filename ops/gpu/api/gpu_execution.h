#pragma once
/// This header has what the executions of batches on GPUs have in common. For the thread that has
/// the turn.
// Tested in tests/ops/gpu/nccl/nccl_backend_test.cc

#include <string_view>
#include <vector>

#include "hvd/backend.h"
#include "ops/gpu/api/handles.h"

namespace hvd::gpu {

/// Makes the stream wait for the batch's inputs.
inline void wait_for_inputs(const CallContext& site, const Stream& stream, const Batch& batch) {
  void* last = nullptr;  // members of one step often share their event
  for (const BatchMember& member : batch.members) {
    if (member.ready_event == nullptr || member.ready_event == last) continue;
    last = member.ready_event;
    stream.wait_for(site, static_cast<CudaEvent*>(last));
  }
}

/// Returns the members' names, in order.
inline std::vector<std::string_view> names_of(const Batch& batch) {
  std::vector<std::string_view> names;
  for (const BatchMember& member : batch.members) names.push_back(member.name);
  return names;
}

}  // namespace hvd::gpu
