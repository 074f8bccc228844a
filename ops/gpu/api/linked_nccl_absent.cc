// The twin of linked_nccl_present.cc: this build has CUDA, but no NCCL. Placement asks for none then.
// Tested in tests/system/scripts/without_nccl.sh

#include "ops/gpu/api/linked_nccl.h"

namespace hvd::gpu {

namespace {

template <class... Arguments>
void refuse(std::function<NcclCode(Arguments...)>& entry) {
  entry = [](Arguments... /*unused*/) { return NcclCode::InvalidUsage; };
}

template <class... Entries>
void refuse_all(Entries&... entries) {
  (refuse(entries), ...);
}

}  // namespace

void fill_nccl(GpuApi& table) {
  refuse_all(table.get_unique_id, table.comm_init_rank, table.comm_abort, table.comm_get_async_error, table.comm_register,
             table.comm_deregister, table.mem_alloc, table.mem_free, table.group_start, table.group_end, table.all_reduce, table.broadcast,
             table.all_gather, table.reduce, table.reduce_scatter, table.send, table.receive);
  table.nccl_error = [](NcclCode /*code*/, NcclComm* /*comm*/) { return std::string("built without NCCL"); };
}

bool nccl_built() { return false; }
std::string nccl_version() { return "built without NCCL"; }

}  // namespace hvd::gpu
