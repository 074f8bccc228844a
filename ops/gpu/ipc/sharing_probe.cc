#include "ops/gpu/ipc/sharing_probe.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hvd/base/text.h"

namespace hvd::gpu {

using Probe = SharedControl::Probe;

SharingProbe::SharingProbe(const GpuApi& table, int device, std::vector<SharedControl*> controls,
                           std::size_t self, std::function<void()> ring,
                           std::function<bool()> interrupted, Remark refused,
                           SharingPatience patience)
    : table_(table),
      device_(device),
      controls_(std::move(controls)),
      self_(self),
      ring_(std::move(ring)),
      interrupted_(std::move(interrupted)),
      tell_refused_(std::move(refused)),
      patience_(std::move(patience)),
      decided_(controls_.size() < 2) {}

/// Leaves to the process what others may have open.
SharingProbe::~SharingProbe() = default;

bool SharingProbe::possible() {
  const auto deadline = std::chrono::steady_clock::now() + patience_.limit;
  bool told = patience_.limit.count() == 0 || !patience_.tell;
  for (bool rung = false; !decided_.load(std::memory_order_acquire);) {
    {
      const std::lock_guard lock(mutex_);
      if (!decided_.load()) step();
    }
    if (decided_.load() || interrupted_()) break;
    if (!std::exchange(rung, true)) ring_();
    if (!told && std::chrono::steady_clock::now() > deadline) {
      told = true;
      patience_.tell(missing());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return possible_.load();
}

void SharingProbe::look() {
  if (decided_.load(std::memory_order_acquire)) return;
  const auto has_begun = [](const SharedControl* control) {
    return control->probe.load(std::memory_order_acquire) != Probe::None;
  };
  if (std::none_of(controls_.begin(), controls_.end(), has_begun)) return;
  const std::lock_guard lock(mutex_);
  if (!decided_.load()) step();
}

/// Returns those that have not begun or, when all have, those that have not ended.
std::vector<std::size_t> SharingProbe::missing() const {
  Probe least = Probe::Opened;
  for (std::size_t i = 0; i < controls_.size(); ++i)
    if (i != self_) least = std::min(least, controls_[i]->probe.load());
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < controls_.size(); ++i)
    if (i != self_ && controls_[i]->probe.load() == least) found.push_back(i);
  return found;
}

void SharingProbe::step() {
  const Probe before = own().probe.load(std::memory_order_relaxed);
  if (before == Probe::None) say(export_own() ? Probe::Exported : Probe::Refused);
  const auto all = [&](auto has) {
    return std::all_of(controls_.begin(), controls_.end(),
                       [&](const SharedControl* control) { return has(control->probe.load()); });
  };
  const bool all_exported = all([](Probe answer) { return answer != Probe::None; });
  if (own().probe.load() == Probe::Exported && all_exported)
    say(open_all() ? Probe::Opened : Probe::Refused);
  if (own().probe.load() != before) ring_();
  if (!all([](Probe answer) { return answer == Probe::Opened || answer == Probe::Refused; }))
    return;
  free_own();
  const auto first = std::find_if(
      controls_.begin(), controls_.end(),
      [](const SharedControl* control) { return control->probe.load() == Probe::Refused; });
  possible_ = first == controls_.end();
  if (first != controls_.end() && *first == controls_[self_] && tell_refused_)
    tell_refused_(refusal_);
  decided_.store(true, std::memory_order_release);
}

bool SharingProbe::ask(CudaCode code, const char* call) {
  if (code != CudaCode::Success) refusal_ = formatted("{} says {}", call, table_.cuda_error(code));
  return code == CudaCode::Success;
}

bool SharingProbe::export_own() {
  const DeviceGuard guard(table_, device_);
  return ask(table_.device_malloc(&memory_, kDeviceGranularity), "cudaMalloc") &&
         ask(table_.ipc_get_memory(&own().probe_memory, memory_), "cudaIpcGetMemHandle") &&
         ask(table_.ipc_event_create(&event_), "cudaEventCreateWithFlags") &&
         ask(table_.ipc_get_event(&own().probe_event, event_), "cudaIpcGetEventHandle");
}

/// One that has refused has nothing to open, and all know already.
bool SharingProbe::open_all() {
  const DeviceGuard guard(table_, device_);
  bool opened = true;
  for (SharedControl* const control : controls_) {
    if (control == controls_[self_] || control->probe.load() == Probe::Refused) continue;
    void* memory = nullptr;
    CudaEvent* event = nullptr;
    opened = opened &&
             ask(table_.ipc_open_memory(&memory, control->probe_memory), "cudaIpcOpenMemHandle") &&
             ask(table_.ipc_open_event(&event, control->probe_event), "cudaIpcOpenEventHandle");
    if (memory != nullptr) table_.ipc_close_memory(memory);
    if (event != nullptr) table_.event_destroy(event);
  }
  return opened;
}

void SharingProbe::free_own() {
  const DeviceGuard guard(table_, device_);
  if (event_ != nullptr) table_.event_destroy(std::exchange(event_, nullptr));
  if (memory_ != nullptr) table_.device_free(std::exchange(memory_, nullptr));
}

}  // namespace hvd::gpu
