#pragma once
/// What LibTorch's headers name of CUDA's other libraries, and these tests do not use.

#include <cuda_runtime_api.h>

using cublasHandle_t = struct cublasContext*;
using cublasLtHandle_t = struct cublasLtContext*;
using cusolverDnHandle_t = struct cusolverDnContext*;
using cusparseHandle_t = struct cusparseContext*;
enum cublasStatus_t : int;
enum cusolverStatus_t : int;
enum cusparseStatus_t : int;
