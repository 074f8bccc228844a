#pragma once
/// What the cases of torch_omissions.cc share, and those that are in torch_omission_cases.cc. For a
/// process of its own; one thread, but for `call`.

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <hvd/torch.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "tests/gpu/double/work.h"

namespace hvd::gpu::test {

using c10::cuda::CUDAStream;

inline int failures = 0;

inline bool is_set(const char* name) { return std::getenv(name) != nullptr; }

inline void expect(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what);
  if (is_set("HVD_TEST_GPU_OMIT")) ::_exit(1);  // found
}
/// The device that is current where a thread begins, on which nobody is to leave anything behind.
inline int foreign() { return std::atoi(std::getenv("HVD_TEST_GPU_CURRENT")); }

inline at::Tensor filled(double value, at::IntArrayRef sizes) {
  return torch::full(sizes, value, at::TensorOptions(at::kFloat).device(hvd::local_device()));
}
inline bool is_all(const at::Tensor& tensor, double value) {
  return torch::all(tensor.cpu() == value).item<bool>();
}
inline void synchronize() {
  for (int device = 0; device < torch::cuda::device_count(); ++device)
    if (c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(device)))
      torch::cuda::synchronize(device);
}
inline CUDAStream new_stream() {
  return c10::cuda::getStreamFromPool(false, hvd::local_device().index());
}
/// Tensors go through the host.
inline bool is_staged() { return std::string_view(std::getenv("HVD_GPU_BACKEND")) == "staged"; }

/// Gives what a collective gave. hvd waits for what is staged, as no stream does: it is there.
inline at::Tensor handed(const at::Tensor& tensor) {
  static auto* const hand_on = reinterpret_cast<void (*)(const void*, std::size_t)>(
      dlsym(RTLD_DEFAULT, "hvd_double_hand_on"));
  if (is_staged()) hand_on(tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

/// Submits a tensor as a caller without LibTorch does, whose device is whichever is current. It is
/// reduced in place.
inline auto plainly_reduced(const at::Tensor& tensor, const std::string& name,
                            const hvd::ProcessSet& set = {}) {
  const hvd::Buffer buffer{tensor.data_ptr(),
                           hvd::DataType::Float32,
                           {tensor.numel()},
                           {hvd::DeviceKind::Cuda, hvd::local_device().index()}};
  return hvd::allreduce_async(buffer, buffer,
                              {.name = name, .op = hvd::ReduceOp::Average, .process_set = set});
}

/// Holds a stream up until it is opened.
class Gate {
 public:
  explicit Gate(const CUDAStream& stream) {
    using namespace cuda;
    static auto* const enqueue =
        reinterpret_cast<Enqueue*>(dlsym(RTLD_DEFAULT, "hvd_double_enqueue"));
    const c10::cuda::CUDAGuard guard(stream.device());
    expect(enqueue(stream.stream(),
                   {{.name = "a gate"}, [open = open_] { return open->load(); }}) == cudaSuccess,
           "a gate on a stream");
  }
  void open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

/// hvd is called with a device current that is not its own: that of this thread, or of a fresh one
/// that has not touched any.
inline void call(const CUDAStream& stream, const std::function<void()>& body) {
  const auto here = [&] {
    c10::cuda::setCurrentCUDAStream(stream);
    const auto before = c10::cuda::current_device();
    body();
    expect(c10::cuda::current_device() == before, "the caller's device to be current again");
  };
  if (is_set("USERS_DEVICE")) return here();
  std::exception_ptr error;
  std::thread([&] {
    try {
      here();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

/// A rank dies while another's stream is held up, and tensors go through NCCL or a shared GPU.
void run_death();
/// Likewise, and tensors go through the host: back from there, or to there.
void run_death_on_the_way_back();
void run_death_on_the_way_there();
/// Results have no room on a rank's GPU.
void run_full_gpu();
/// A shared GPU has no room for what the ranks share. Nothing works afterwards.
void run_full_pool();
/// Two of three ranks share a GPU, and all see another.
void run_set_that_shares();
/// Batches are in flight on several streams of hvd's.
void run_streams();
/// Batches outgrow their buffer.
void run_growth();
/// Gradients of a bucket are written on two streams, and travel as they are or as fp16.
void run_gradients_on_two_streams(bool fp16);
/// Gradients of a bucket are accumulated on two streams.
void run_accumulators_on_two_streams();
/// Gradients are there without a backward pass.
void run_gradients_by_hand();

}  // namespace hvd::gpu::test
