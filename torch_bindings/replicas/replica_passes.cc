#include "torch_bindings/replicas/replica_passes.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <latch>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "hvd/base/threads.h"
#include "hvd/world.h"
#include "torch_bindings/platform/stream_set.h"
#include "torch_bindings/precision/autocast.h"

namespace hvd::detail {

using Tensors = std::vector<at::Tensor>;

namespace {

/// The number of threads that LibTorch uses is each thread's own, but at::set_num_threads also sets
/// the one that new threads begin with. While workers take their share, one pass after the other, a
/// new thread keeps that number and puts it back; workers wait for that.
class ThreadShares {
 public:
  /// For a thread that works with LibTorch for the first time: its number is then not that of the
  /// workers of another one's pass.
  static void look() {
    const std::lock_guard lock(starting());
    at::get_num_threads();
  }
  explicit ThreadShares(std::size_t workers)
      : only_one_(starting()), taken_(static_cast<std::ptrdiff_t>(workers)) {
    share_ = std::max(1, at::get_num_threads() / static_cast<int>(workers));
    const SignalsKeptOff of_it;
    keeper_ = std::thread([this] {
      const int of_new_threads = at::get_num_threads();
      known_.count_down();
      taken_.wait();
      at::set_num_threads(of_new_threads);
      put_back_.count_down();
    });
    known_.wait();
  }
  /// By each worker, once.
  void take() {
    // a thread's first look sets it to what new threads begin with, also after set_num_threads
    at::get_num_threads();
    at::set_num_threads(share_);
    taken_.count_down();
    put_back_.wait();
  }
  /// Ends the start of the workers, of which so many have not been started.
  void finish(std::size_t missing) {
    taken_.count_down(static_cast<std::ptrdiff_t>(missing));
    keeper_.join();
    only_one_.unlock();
  }

 private:
  static std::mutex& starting() {
    static std::mutex mutex;
    return mutex;
  }
  std::unique_lock<std::mutex> only_one_;
  int share_ = 1;
  std::latch known_{1}, taken_, put_back_{1};
  std::thread keeper_;
};

/// The outputs that are trained, and their gradients on the replica's device.
void append_to(Tensors& outputs, Tensors& gradients, const ReplicaPass& replica) {
  for (std::size_t i = 0; i < replica.outputs.size(); ++i) {
    if (!replica.outputs[i].requires_grad()) continue;
    outputs.push_back(replica.outputs[i]);
    gradients.push_back(replica.gradients[i].to(replica.device));
  }
}

}  // namespace

void look_at_number_of_threads() { ThreadShares::look(); }

void in_parallel(const std::vector<at::Device>& devices,
                 const std::function<void(std::size_t)>& work) {
  const at::ThreadLocalState settings;
  const World world = World::current();
  const auto kind = devices.front().type();
  const bool autocast = at::autocast::is_autocast_enabled(kind);
  const auto autocast_type = at::autocast::get_autocast_dtype(kind);
  const auto streams = current_streams(devices);  // what the caller has queued there comes first
  std::vector<std::exception_ptr> errors(devices.size());
  const auto call = [&](std::size_t i) {
    try {
      const at::ThreadLocalStateGuard same_settings(settings);
      const WorldScope same_world(world, WorldScope::kAlsoGlobal);
      const c10::MultiStreamGuard same_streams(streams);
      const c10::OptionalDeviceGuard device(devices[i].is_cpu() ? std::nullopt
                                                                : std::optional(devices[i]));
      std::optional<AutocastGuard> same_autocast;
      if (autocast) same_autocast.emplace(kind, autocast_type);
      work(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::optional<ThreadShares> shares;
  std::vector<std::thread> running;
  running.reserve(devices.size());
  try {
    shares.emplace(devices.size());
    while (running.size() < devices.size()) {
      const SignalsKeptOff of_it;
      running.emplace_back([&, i = running.size()] {
        shares->take();
        call(i);
      });
    }
  } catch (const std::exception&) {  // the system has no more threads, or no memory for one
  }
  if (shares) shares->finish(devices.size() - running.size());
  for (std::size_t i = running.size(); i < devices.size(); ++i) call(i);
  for (auto& thread : running) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

std::vector<Tensors> gradients_in_one_pass(const std::vector<ReplicaPass>& replicas) {
  Tensors outputs, gradients, wanted;
  std::unordered_map<const void*, std::size_t> places;  // of what is wanted, each once
  for (const auto& replica : replicas) {
    for (const auto& tensor : replica.wanted)
      if (places.emplace(tensor.unsafeGetTensorImpl(), wanted.size()).second)
        wanted.push_back(tensor);
    append_to(outputs, gradients, replica);
  }
  Tensors found(wanted.size());
  if (!outputs.empty() && !wanted.empty())
    found = torch::autograd::grad(outputs, wanted, gradients, /*retain_graph=*/false,
                                  /*create_graph=*/false, /*allow_unused=*/true);
  std::vector<Tensors> of_replicas;
  for (const auto& replica : replicas) {
    auto& own = of_replicas.emplace_back();
    for (const auto& tensor : replica.wanted)
      own.push_back(std::exchange(found[places.at(tensor.unsafeGetTensorImpl())], {}));
  }
  return of_replicas;
}

std::vector<Tensors> gradients_in_parallel(const std::vector<ReplicaPass>& replicas) {
  std::vector<at::Device> devices;
  for (const auto& replica : replicas) devices.push_back(replica.device);
  std::vector<Tensors> of_replicas(replicas.size());
  in_parallel(devices, [&](std::size_t i) {
    of_replicas[i] = std::move(gradients_in_one_pass({replicas[i]}).front());
  });
  return of_replicas;
}

}  // namespace hvd::detail
