#pragma once
/// The part of NCCL 2.28 that hvd and the virtual GPU use; see cuda.h.

#include <cuda_runtime_api.h>

#include "tests/gpu/double/include/cuda.h"

HVD_ENUM(ncclResult_t, HVD_VALUE(ncclSuccess, 0) HVD_VALUE(ncclUnhandledCudaError, 1)
                           HVD_VALUE(ncclInvalidArgument, 4) HVD_VALUE(ncclInvalidUsage, 5)
                               HVD_VALUE(ncclRemoteError, 6) HVD_VALUE(ncclInProgress, 7));
HVD_ENUM(ncclDataType_t,
         HVD_VALUE(ncclInt8, 0) HVD_VALUE(ncclUint8, 1) HVD_VALUE(ncclInt32, 2)
             HVD_VALUE(ncclInt64, 4) HVD_VALUE(ncclFloat16, 6) HVD_VALUE(ncclFloat32, 7)
                 HVD_VALUE(ncclFloat64, 8) HVD_VALUE(ncclBfloat16, 9));
HVD_ENUM(ncclRedOp_t,
         HVD_VALUE(ncclSum, 0) HVD_VALUE(ncclProd, 1) HVD_VALUE(ncclMax, 2) HVD_VALUE(ncclMin, 3)
             HVD_VALUE(ncclAvg, 4) HVD_VALUE(ncclMaxRedOp, 0x7fffffff));
HVD_ENUM(, HVD_VALUE(NCCL_WIN_COLL_SYMMETRIC, 1));

#ifndef HVD_TOOLKITS_HEADERS
#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 28, 9)
#define NCCL_CONFIG_INITIALIZER \
  {}

using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;
struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  char unused_1[16];
  int blocking;
  char unused_2[28];
  const char* commName;
  char unused_3[24];
};
#endif

static_assert(sizeof(ncclUniqueId) == 128 && offsetof(ncclConfig_t, blocking) == 16 &&
              offsetof(ncclConfig_t, commName) == 48);

extern "C" {
ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
const char* ncclGetErrorString(ncclResult_t error);
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state);
ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes);
ncclResult_t ncclMemFree(void* memory);
ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, std::size_t bytes, void** handle);
ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, std::size_t bytes,
                                    ncclWindow_t* window, int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
}
