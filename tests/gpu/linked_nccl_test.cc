// NCCL's half of the linked table over an NCCL and a CUDA of this file's: every call goes to the
// NCCL that this program is linked with, and leaves the thread's last CUDA error as it was, as NCCL
// up to 2.29 does not. Needs no GPU; a skip (77) where NCCL is not built. A plain program: prints
// what it found, returns 1 if anything is wrong.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <functional>
#include <string>

#include "ops/gpu/api/gpu_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

namespace {

cudaError_t last_error = cudaSuccess;  // of the only thread
std::string called;

/// A call of NCCL's that tries something, and does without.
ncclResult_t note(const char* name) {
  called = name;
  last_error = cudaErrorInvalidValue;
  return ncclSuccess;
}

}  // namespace

// What CUDA and NCCL define, the program's own comes first.
extern "C" {
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return note("ncclGetUniqueId"); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) {
  return note("ncclCommInitRankConfig");
}
ncclResult_t ncclCommAbort(ncclComm_t) { return note("ncclCommAbort"); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*) {
  return note("ncclCommGetAsyncError");
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void**) {
  return note("ncclCommRegister");
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return note("ncclCommDeregister"); }
ncclResult_t ncclMemAlloc(void**, size_t) { return note("ncclMemAlloc"); }
ncclResult_t ncclMemFree(void*) { return note("ncclMemFree"); }
ncclResult_t ncclGroupStart() { return note("ncclGroupStart"); }
ncclResult_t ncclGroupEnd() { return note("ncclGroupEnd"); }
ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t) {
  return note("ncclAllReduce");
}
ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                           cudaStream_t) {
  return note("ncclBroadcast");
}
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  return note("ncclAllGather");
}
ncclResult_t ncclReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t,
                        cudaStream_t) {
  return note("ncclReduce");
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) {
  return note("ncclReduceScatter");
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return note("ncclSend");
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return note("ncclRecv");
}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return note("ncclCommWindowRegister");
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return note("ncclCommWindowDeregister");
}
#endif
}

namespace {

using namespace hvd::gpu;

int failures = 0;

void fail(const std::string& name, const char* what) {
  ++failures;
  std::printf("FAILED: %s: %s\n", name.c_str(), what);
}

void expect(const std::string& name, const std::function<void()>& call) {
  called.clear();
  last_error = cudaSuccess;
  call();
  if (called != name) return fail(name, "does not go to the NCCL that this program is linked with");
  if (last_error != cudaSuccess) fail(name, "leaves an error behind");
  last_error = cudaErrorLaunchFailure;
  call();
  if (last_error == cudaSuccess) fail(name, "takes the user's own error away");
}

void call_all(const GpuApi& table) {
  NcclUniqueId id;
  NcclComm* comm = nullptr;
  CudaStream* const stream = nullptr;
  NcclCode state{};
  void* out = nullptr;
  char at[8] = {};
  using enum NcclType;
  expect("ncclGetUniqueId", [&] { table.get_unique_id(&id); });
  expect("ncclCommInitRankConfig", [&] { table.comm_init_rank(&comm, 1, id, 0, true, "name"); });
  expect("ncclCommGetAsyncError", [&] { table.comm_get_async_error(comm, &state); });
  expect("ncclCommRegister", [&] { table.comm_register(comm, at, 8, &out); });
  expect("ncclCommDeregister", [&] { table.comm_deregister(comm, at); });
  expect("ncclMemAlloc", [&] { table.mem_alloc(&out, 8); });
  expect("ncclMemFree", [&] { table.mem_free(at); });
  expect("ncclGroupStart", [&] { table.group_start(); });
  expect("ncclGroupEnd", [&] { table.group_end(); });
  expect("ncclAllReduce", [&] { table.all_reduce(at, at, 1, Float32, NcclOp::Sum, comm, stream); });
  expect("ncclBroadcast", [&] { table.broadcast(at, at, 1, Float32, 0, comm, stream); });
  expect("ncclAllGather", [&] { table.all_gather(at, at, 1, Float32, comm, stream); });
  expect("ncclReduce", [&] { table.reduce(at, at, 1, Float32, NcclOp::Sum, 0, comm, stream); });
  expect("ncclReduceScatter",
         [&] { table.reduce_scatter(at, at, 1, Float32, NcclOp::Sum, comm, stream); });
  expect("ncclSend", [&] { table.send(at, 1, Float32, 0, comm, stream); });
  expect("ncclRecv", [&] { table.receive(at, 1, Float32, 0, comm, stream); });
  expect("ncclCommAbort", [&] { table.comm_abort(comm); });
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  if (!table.window_register) return fail("ncclCommWindowRegister", "is not found");
  expect("ncclCommWindowRegister", [&] { table.window_register(comm, at, 8, &out); });
  expect("ncclCommWindowDeregister", [&] { table.window_deregister(comm, at); });
#endif
}

}  // namespace

int main() {
  if (!nccl_built()) return 77;
  call_all(*linked_gpu_api());
  std::printf("%d calls are wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
#else
int main() { return 77; }
#endif
