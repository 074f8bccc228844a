// The headers here, compared with a toolkit's: the values, where fields lie, and, as C's functions
// cannot be declared in two ways, the signatures. Compiled where there is one, and never linked.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)  // which windows came with
#define HVD_TOOLKITS_HEADERS
#include "tests/gpu/double/include/cuda_runtime_api.h"
#include "tests/gpu/double/include/nccl.h"
#endif
