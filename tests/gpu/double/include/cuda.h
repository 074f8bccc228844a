#pragma once
/// The part of CUDA's driver API that hvd and the virtual GPU use, and how these headers are
/// written: with HVD_TOOLKITS_HEADERS defined, behind the toolkit's own, they define nothing and
/// compare what they have with those (header_check.cc).

#ifdef HVD_TOOLKITS_HEADERS
#define HVD_ENUM(name, values) values
#define HVD_VALUE(name, value) static_assert((name) == (value));
#else
#define HVD_ENUM(name, values) enum name { values }
#define HVD_VALUE(name, value) name = (value),

using CUdevice = int;
using CUcontext = struct CUctx_st*;
#endif

HVD_ENUM(CUresult, HVD_VALUE(CUDA_SUCCESS, 0) HVD_VALUE(CUDA_ERROR_NO_DEVICE, 100)
                       HVD_VALUE(CUDA_ERROR_INVALID_CONTEXT, 201));
HVD_ENUM(CUdevice_attribute, HVD_VALUE(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 132));
