#pragma once
/// The part of CUDA 13's runtime API that hvd, its tests and the virtual GPU use: where no toolkit
/// is installed, and always for the virtual GPU itself. Values, layouts and signatures are facts of
/// CUDA's documentation; see cuda.h.

#include <cstddef>

#include "tests/gpu/double/include/cuda.h"

HVD_ENUM(cudaError,
         HVD_VALUE(cudaSuccess, 0) HVD_VALUE(cudaErrorInvalidValue, 1)
             HVD_VALUE(cudaErrorMemoryAllocation, 2) HVD_VALUE(cudaErrorNoDevice, 100)
                 HVD_VALUE(cudaErrorInvalidDevice, 101)
                     HVD_VALUE(cudaErrorInvalidResourceHandle, 400)
                         HVD_VALUE(cudaErrorNotReady, 600) HVD_VALUE(cudaErrorIllegalAddress, 700)
                             HVD_VALUE(cudaErrorHostMemoryAlreadyRegistered, 712)
                                 HVD_VALUE(cudaErrorHostMemoryNotRegistered, 713)
                                     HVD_VALUE(cudaErrorStreamCaptureUnsupported, 900)
                                         HVD_VALUE(cudaErrorStreamCaptureInvalidated, 901)
                                             HVD_VALUE(cudaErrorStreamCaptureUnmatched, 903)
                                                 HVD_VALUE(cudaErrorStreamCaptureIsolation, 905)
                                                     HVD_VALUE(cudaErrorStreamCaptureImplicit, 906)
                                                         HVD_VALUE(cudaErrorCapturedEvent, 907));
HVD_ENUM(cudaMemcpyKind, HVD_VALUE(cudaMemcpyHostToDevice, 1) HVD_VALUE(cudaMemcpyDeviceToHost, 2)
                             HVD_VALUE(cudaMemcpyDefault, 4));
HVD_ENUM(cudaMemoryType, HVD_VALUE(cudaMemoryTypeUnregistered, 0) HVD_VALUE(cudaMemoryTypeHost, 1)
                             HVD_VALUE(cudaMemoryTypeDevice, 2));
HVD_ENUM(cudaDeviceAttr, HVD_VALUE(cudaDevAttrComputeCapabilityMajor, 75)
                             HVD_VALUE(cudaDevAttrComputeCapabilityMinor, 76)
                                 HVD_VALUE(cudaDevAttrConcurrentManagedAccess, 89)
                                     HVD_VALUE(cudaDevAttrIpcEventSupport, 125));
HVD_ENUM(cudaStreamCaptureMode,
         HVD_VALUE(cudaStreamCaptureModeGlobal, 0) HVD_VALUE(cudaStreamCaptureModeThreadLocal, 1)
             HVD_VALUE(cudaStreamCaptureModeRelaxed, 2));
HVD_ENUM(cudaStreamCaptureStatus,
         HVD_VALUE(cudaStreamCaptureStatusNone, 0) HVD_VALUE(cudaStreamCaptureStatusActive, 1)
             HVD_VALUE(cudaStreamCaptureStatusInvalidated, 2));
HVD_ENUM(cudaDriverEntryPointQueryResult, HVD_VALUE(cudaDriverEntryPointSuccess, 0));
HVD_ENUM(, HVD_VALUE(cudaStreamNonBlocking, 1) HVD_VALUE(cudaEventDefault, 0)
               HVD_VALUE(cudaEventDisableTiming, 2) HVD_VALUE(cudaEventInterprocess, 4));
HVD_ENUM(, HVD_VALUE(cudaEventRecordDefault, 0) HVD_VALUE(cudaEventRecordExternal, 1)
               HVD_VALUE(cudaEventWaitDefault, 0) HVD_VALUE(cudaEventWaitExternal, 1));
HVD_ENUM(, HVD_VALUE(cudaHostAllocPortable, 1) HVD_VALUE(cudaHostAllocMapped, 2));
HVD_ENUM(, HVD_VALUE(cudaHostRegisterPortable, 1) HVD_VALUE(cudaHostRegisterMapped, 2));
HVD_ENUM(, HVD_VALUE(cudaEnableDefault, 0) HVD_VALUE(cudaMemAttachGlobal, 1)
               HVD_VALUE(cudaIpcMemLazyEnablePeerAccess, 1));

#ifndef HVD_TOOLKITS_HEADERS
#define CUDART_VERSION 13000
#define CUDART_CB

using cudaError_t = cudaError;
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaHostFn_t = void (*)(void*);
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))

struct cudaGraphEdgeData;
struct cudaLaunchAttribute;
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaIpcEventHandle_t {
  char reserved[64];
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* unused[10];
};
struct cudaDeviceProp {
  char name[256];
  struct {
    char bytes[16];
  } uuid;
  char unused_1[16];
  std::size_t totalGlobalMem;
  char unused_2[12];
  int warpSize;
  std::size_t unused_3;
  int maxThreadsPerBlock;
  char unused_4[36];
  int major, minor;
  char unused_5[16];
  int multiProcessorCount;
  char unused_6[184];
  int pciDeviceID;
  char unused_7[432];
};
#endif

static_assert(sizeof(cudaLaunchConfig_t) == 56 && offsetof(cudaLaunchConfig_t, stream) == 32);
static_assert(sizeof(cudaIpcMemHandle_t) == 64 && sizeof(cudaIpcEventHandle_t) == 64);
static_assert(sizeof(cudaPointerAttributes) == 88 && offsetof(cudaPointerAttributes, type) == 0 &&
              offsetof(cudaPointerAttributes, device) == 4);
static_assert(sizeof(cudaDeviceProp) == 1008 && offsetof(cudaDeviceProp, name) == 0 &&
              offsetof(cudaDeviceProp, uuid) == 256 && sizeof(cudaDeviceProp::uuid) == 16 &&
              offsetof(cudaDeviceProp, totalGlobalMem) == 288 &&
              offsetof(cudaDeviceProp, warpSize) == 308 &&
              offsetof(cudaDeviceProp, maxThreadsPerBlock) == 320 &&
              offsetof(cudaDeviceProp, major) == 360 && offsetof(cudaDeviceProp, minor) == 364 &&
              offsetof(cudaDeviceProp, multiProcessorCount) == 384 &&
              offsetof(cudaDeviceProp, pciDeviceID) == 572);

extern "C" {
// ---- devices
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status);
// ---- errors
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
// ---- streams and events
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);
// ---- what is put on streams
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                std::size_t bytes, cudaStream_t stream);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
// ---- captures
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);
// ---- memory
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaHostGetDevicePointer(void** address, void* memory, unsigned flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);
// ---- other processes
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle);
}
