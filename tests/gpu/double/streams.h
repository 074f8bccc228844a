#pragma once
/// The streams and events of this process on virtual GPUs, behind the names of CUDA's runtime. Any
/// thread, under a Lock, but for `wait`.

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/double/world.h"
#include "tests/support/gpu/host_streams.h"

namespace hvd::gpu::test::cuda {

/// A CUDA graph: what it is to do, in an order.
struct Graph {
  std::vector<StreamOperation> operations;
  bool broken = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  unsigned long long id = 0;
};

}  // namespace hvd::gpu::test::cuda

struct CUstream_st {
  hvd::gpu::test::HostStreams::Stream* queue = nullptr;
  int device = 0;
  std::string name;
  std::shared_ptr<hvd::gpu::test::cuda::Graph> captures;  ///< what lies on it goes there
  bool began_capture = false;
};

struct CUevent_st {
  using Shared = hvd::gpu::test::HostCluster::SharedEvent;
  std::shared_ptr<Shared> shared;
  int device = 0;
  unsigned flags = 0;
  bool imported = false;
  bool recorded = false;
  std::shared_ptr<hvd::gpu::test::cuda::Graph> captured;  ///< recorded in a capture
};

namespace hvd::gpu::test::cuda {

/// Returns `error`, which the thread's last one becomes unless it is a success.
cudaError_t done(cudaError_t error);
/// The calling thread's device.
int current_device();
/// Counts a call that works on the current device, makes the context there, and says whether it has
/// to be refused, as it breaks a capture, or as a kernel has failed there: that every call says.
enum class Capture : std::uint8_t { Allowed, Unsafe };
cudaError_t enter(Capture kind = Capture::Allowed);

/// While it lives, the host speaks as hvd, whose code is linked into the program, or as LibTorch
/// and the user: what hvd has learned by asking is not what they may count on.
class Speaker {
 public:
  explicit Speaker(const void* caller);
  ~Speaker();
  Speaker(const Speaker&) = delete;
  Speaker& operator=(const Speaker&) = delete;
};

/// The stream that a handle means, or null.
CUstream_st* known(cudaStream_t stream);
bool is_known(cudaEvent_t event);
/// Puts work on a stream, or into the graph that it is captured into.
cudaError_t enqueue(CUstream_st& stream, StreamOperation operation);
/// Its name gets the stream's. Where it uses memory that is not there, that is an error of the
/// device, for good.
cudaError_t enqueue(CUstream_st& stream, Work work);
/// Complains of a kernel that uses memory of a device whose memory the stream's does not reach.
void check_access(const CUstream_st& stream, const UseOfMemory& use);
/// Waits, without a Lock, for what has been put on the stream so far.
cudaError_t wait(const CUstream_st& stream);
cudaError_t wait_for_device(int device);
/// Lets the streams go on; `asked`: somebody waits for it.
void go_on(const std::shared_ptr<CUevent_st::Shared>& asked, std::uint64_t turn);
std::uint64_t random_number();

}  // namespace hvd::gpu::test::cuda

#define HVD_EXPORTED extern "C" __attribute__((visibility("default")))
