#include "ops/gpu/api/wait_idle.h"

#include <thread>

namespace hvd::gpu {

bool comes_to_rest(const GpuApi& table, int device, const Stream& stream, std::chrono::milliseconds limit) noexcept {
  if (stream.get() == nullptr) return true;
  const DeviceGuard guard(table, device);
  CudaEvent* event = nullptr;
  if (table.event_create(&event) != CudaCode::Success) return false;
  CudaCode code = table.event_record(event, stream.get());
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (code == CudaCode::Success) {
    code = table.event_query(event);
    if (code != CudaCode::NotReady || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    code = CudaCode::Success;
  }
  table.event_destroy(event);
  return code == CudaCode::Success;
}

}  // namespace hvd::gpu
