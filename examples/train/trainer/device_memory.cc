#include "examples/train/trainer/device_memory.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace examples {

void reset_device_peak(torch::Device device) {
  if (device.is_cuda()) at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

std::int64_t device_peak(torch::Device device) {
  if (!device.is_cuda()) return 0;
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
}

}  // namespace examples
