#include "examples/train/trainer/costs.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <fstream>
#include <string>

namespace examples {

void reset_peak_bytes() { std::ofstream("/proc/self/clear_refs") << 5; }

std::int64_t peak_bytes() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

void reset_device_peak(torch::Device device) {
  if (device.is_cuda()) at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

std::int64_t device_peak(torch::Device device) {
  if (!device.is_cuda()) return 0;
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
      .peak;
}

}  // namespace examples
