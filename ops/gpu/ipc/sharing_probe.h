#pragma once
/// A SharingProbe finds out, at the first use of a GPU that several ranks share, whether they can
/// have each other's memory and events: CUDA says that a device can, and the system may keep
/// processes from it all the same (containers, MIG, WSL2). Every rank exports a piece of memory and
/// an event, opens those of all others, and says in shared memory what came of it; all decide
/// alike. Nothing is tried before some rank uses the GPU: a process without GPU tensors never
/// touches it, unless another rank of these does.
///
/// Any thread. Who asks waits for the other ranks, whose threads that have the turn answer
/// (`look`). It owns what it exports, until all have closed it. A call that is refused is an
/// answer, and no error.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/gpu/api/call.h"
#include "ops/gpu/ipc/device_pool.h"

namespace hvd::gpu {

/// SharingPatience says after how long a wait for answers is told of, once; 0: never.
struct SharingPatience {
  std::chrono::milliseconds limit{0};
  /// Is told which of the ranks have not answered, by their index among those that share the GPU.
  std::function<void(const std::vector<std::size_t>& missing)> tell;
};

class SharingProbe {
 public:
  /// `controls`: of the ranks that share this GPU, of which this is `controls[self]`; one alone
  /// shares with nobody, and nothing is tried. `ring` wakes the others; `interrupted`: true once
  /// the world has failed, which ends the wait. `refused` is told why they cannot, on one rank of
  /// them.
  SharingProbe(const GpuApi& table, int device, std::vector<SharedControl*> controls,
               std::size_t self, std::function<void()> ring, std::function<bool()> interrupted,
               Remark refused, SharingPatience patience = {});
  ~SharingProbe();
  SharingProbe(const SharingProbe&) = delete;
  SharingProbe& operator=(const SharingProbe&) = delete;

  /// Returns whether they can; waits until all have answered. Where the world fails meanwhile,
  /// true.
  bool possible();
  /// Answers, if some rank has asked. Does not wait.
  void look();

 private:
  void step();
  [[nodiscard]] std::vector<std::size_t> missing() const;
  [[nodiscard]] bool export_own();
  [[nodiscard]] bool open_all();
  void free_own();
  bool ask(CudaCode code, const char* call);
  void say(SharedControl::Probe answer) { own().probe.store(answer, std::memory_order_release); }
  [[nodiscard]] SharedControl& own() const { return *controls_[self_]; }

  const GpuApi& table_;
  const int device_;
  const std::vector<SharedControl*> controls_;
  const std::size_t self_;
  const std::function<void()> ring_;
  const std::function<bool()> interrupted_;
  const Remark tell_refused_;
  const SharingPatience patience_;
  std::atomic<bool> decided_, possible_{true};
  std::mutex mutex_;  // of the rest
  void* memory_ = nullptr;
  CudaEvent* event_ = nullptr;
  std::string refusal_;
};

}  // namespace hvd::gpu
