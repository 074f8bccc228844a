// Memory of devices and of the host, copies, and what other processes open.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/gpu/double/streams.h"

namespace hvd::gpu::test::cuda {

namespace {

struct HostPiece {
  std::size_t bytes = 0;
  bool ours = false;  ///< from cudaHostAlloc
};

/// Host memory that the device may reach. Never destroyed.
std::map<std::uintptr_t, HostPiece>& host_memory() {
  static auto* const pieces = new std::map<std::uintptr_t, HostPiece>;
  return *pieces;
}

enum class Place : std::uint8_t { Device, Pinned, InPart, Pageable };

Place place_of(const void* memory, std::size_t bytes) {
  if (is_device_memory(memory)) return Place::Device;
  const std::uintptr_t begin = number_of(memory), end = begin + bytes;
  if (begin >= kManaged && end <= kManaged + kMostProcesses * kManagedBytes) return Place::Pinned;
  for (const auto& [at, piece] : host_memory()) {
    if (begin >= at && end <= at + piece.bytes) return Place::Pinned;
    if (begin < at + piece.bytes && at < end) return Place::InPart;
  }
  return Place::Pageable;
}

bool is_whole(const void* memory, std::size_t bytes) {
  std::uintptr_t begin = 0;
  const World::Piece* const piece = piece_at(memory, &begin);
  return piece != nullptr && number_of(memory) + bytes <= begin + piece->bytes;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t handle,
                 const char* call) {
  CUstream_st* stream = nullptr;
  bool waits = false;
  {
    const Lock lock;
    if (const cudaError_t error = enter(); error != cudaSuccess) return error;
    stream = known(handle);
    if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
    if (bytes == 0) return cudaSuccess;
    if (to == nullptr || from == nullptr) return done(cudaErrorInvalidValue);
    const Place target = place_of(to, bytes), source = place_of(from, bytes);
    if (target == Place::InPart || source == Place::InPart) {
      complain(std::string(call) + " of memory that is registered in part");
      return done(cudaErrorInvalidValue);
    }
    if ((target == Place::Device && !is_whole(to, bytes)) ||
        (source == Place::Device && !is_whole(from, bytes)))
      return done(cudaErrorInvalidValue);
    Work work{
        {.name = call, .reads = {{from, bytes}}, .writes = {{to, bytes}}, .reads_results = true},
        {}};
    if (source == Place::Pageable) {  // CUDA has its own copy before it returns
      auto kept = std::make_shared<std::vector<std::byte>>(bytes);
      std::memcpy(kept->data(), from, bytes);
      work.use.reads.clear();
      work.run = [kept, to, bytes] {
        std::memcpy(to_executor(to), kept->data(), bytes);
        return true;
      };
    } else {
      work.run = [=] {
        std::memmove(to_executor(to), to_executor(from), bytes);
        return true;
      };
    }
    waits = target == Place::Pageable;
    if (const cudaError_t error = enqueue(*stream, std::move(work)); error != cudaSuccess)
      return error;
  }
  return waits ? wait(*stream) : cudaSuccess;
}

cudaError_t register_host(void* memory, std::size_t bytes, bool ours) {
  const std::uintptr_t begin = number_of(memory);
  for (const auto& [at, piece] : host_memory())
    if (begin < at + piece.bytes && at < begin + bytes)
      return done(cudaErrorHostMemoryAlreadyRegistered);
  host_memory()[begin] = {bytes, ours};
  return cudaSuccess;
}

}  // namespace

}  // namespace hvd::gpu::test::cuda

using namespace hvd::gpu::test;
using namespace hvd::gpu::test::cuda;

HVD_EXPORTED cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const Speaker speaker(__builtin_return_address(0));
  static int calls = 0;
  const Lock lock;
  if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  void* const taken = take(current_device(), bytes,
                           "what cudaMalloc " + std::to_string(++calls) + " of rank " +
                               std::to_string(process()) + " gave");
  if (taken == nullptr) return done(cudaErrorMemoryAllocation);
  *memory = taken;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaDeviceSynchronize();
HVD_EXPORTED cudaError_t cudaFree(void* memory) {
  const Speaker speaker(__builtin_return_address(0));
  if (memory == nullptr) return cudaSuccess;
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
    std::uintptr_t begin = 0;
    if (piece_at(memory, &begin) == nullptr || begin != number_of(memory))
      return done(cudaErrorInvalidValue);
  }
  const cudaError_t error = wait_for_device(device_of(memory));  // as CUDA does
  if (error != cudaSuccess) return error;
  const Lock lock;
  give(memory, "cudaFree on rank " + std::to_string(process()));
  look_for_errors();
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  *total = device_bytes();
  *free = device_bytes() - world().devices[current_device()].used;
  return cudaSuccess;
}
/// Host memory: both sides reach it.
HVD_EXPORTED cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned /*flags*/) {
  static bool taken = false;
  if (bytes > kManagedBytes || process() >= kMostProcesses || std::exchange(taken, true))
    return done(cudaErrorMemoryAllocation);
  *memory =
      reinterpret_cast<void*>(kManaged + static_cast<std::uintptr_t>(process()) * kManagedBytes);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned /*flags*/) {
  const Lock lock;
  if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  std::uintptr_t at = kPinned + static_cast<std::uintptr_t>(process()) * kManagedBytes;
  for (const std::uintptr_t end = at + kManagedBytes; const auto& [begin, piece] : host_memory()) {
    if (begin >= end || begin >= at + whole) break;
    at = std::max(at, (begin + piece.bytes + 4095) / 4096 * 4096);
  }
  *memory = reinterpret_cast<void*>(at);
  std::memset(*memory, 0x5a, bytes);
  return register_host(*memory, bytes, true);
}
HVD_EXPORTED cudaError_t cudaFreeHost(void* memory) {
  {
    const Lock lock;
    if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
    const auto found = host_memory().find(number_of(memory));
    if (found == host_memory().end() || !found->second.ours) return done(cudaErrorInvalidValue);
  }
  for (int device = 0; device < device_count(); ++device)
    if (const cudaError_t error = wait_for_device(device); error != cudaSuccess) return error;
  const Lock lock;
  host_memory().erase(number_of(memory));
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned /*flags*/) {
  const Lock lock;
  if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  if (memory == nullptr || bytes == 0) return done(cudaErrorInvalidValue);
  return register_host(memory, bytes, false);
}
HVD_EXPORTED cudaError_t cudaHostUnregister(void* memory) {
  const Lock lock;
  if (const cudaError_t error = enter(Capture::Unsafe); error != cudaSuccess) return error;
  const auto found = host_memory().find(number_of(memory));
  if (found == host_memory().end() || found->second.ours)
    return done(cudaErrorHostMemoryNotRegistered);
  host_memory().erase(found);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaHostGetDevicePointer(void** address, void* memory,
                                                  unsigned /*flags*/) {
  const Lock lock;
  if (place_of(memory, 1) != Place::Pinned) return done(cudaErrorInvalidValue);
  *address = memory;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                  const void* memory) {
  const Lock lock;
  *attributes = {};
  const Place place = place_of(memory, 1);
  attributes->type = place == Place::Device   ? cudaMemoryTypeDevice
                     : place == Place::Pinned ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  attributes->device = place == Place::Device ? device_of(memory) : 0;
  return cudaSuccess;
}

// ---- copies
HVD_EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                         cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  const Speaker speaker(__builtin_return_address(0));
  return copy(to, from, bytes, stream, "cudaMemcpyAsync");
}
HVD_EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from,
                                             int /*from_device*/, std::size_t bytes,
                                             cudaStream_t stream) {
  return copy(to, from, bytes, stream, "cudaMemcpyPeerAsync");
}
HVD_EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                                    cudaMemcpyKind /*kind*/) {
  const Speaker speaker(__builtin_return_address(0));
  if (const cudaError_t error = copy(to, from, bytes, nullptr, "cudaMemcpy"); error != cudaSuccess)
    return error;
  return cudaStreamSynchronize(nullptr);
}
HVD_EXPORTED cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (!is_whole(memory, bytes)) return done(cudaErrorInvalidValue);
  return enqueue(*known(nullptr), Work{{.name = "cudaMemset", .writes = {{memory, bytes}}}, [=] {
                                         std::memset(to_executor(memory), value, bytes);
                                         return true;
                                       }});
}
HVD_EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                            void* data) {
  const Speaker speaker(__builtin_return_address(0));
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  return enqueue(*stream, {.run = [=](Clock& clock) {
    const std::size_t voice = order().speak_as(0);  // the user's
    order().learn(clock);
    order().speak_as(voice);
    function(data);
    return true;
  }});
}

// ---- other processes
HVD_EXPORTED cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (piece_at(memory) == nullptr) return done(cudaErrorInvalidValue);
  *handle = {};
  std::uintptr_t begin = 0;
  piece_at(memory, &begin);
  const std::array<std::uintptr_t, 3> content{2, begin, static_cast<std::uintptr_t>(::getpid())};
  std::memcpy(handle, content.data(), sizeof content);
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle,
                                              unsigned /*flags*/) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  std::array<std::uintptr_t, 3> content{};
  std::memcpy(content.data(), &handle, sizeof content);
  void* const begin = reinterpret_cast<void*>(content[1]);
  World::Piece* const piece = content[0] == 2 ? piece_at(begin) : nullptr;
  if (piece == nullptr || content[2] == static_cast<std::uintptr_t>(::getpid()))
    return done(cudaErrorInvalidValue);
  if (device_of(begin) != current_device()) return done(cudaErrorInvalidValue);
  ++piece->opened;
  *memory = begin;
  return cudaSuccess;
}
HVD_EXPORTED cudaError_t cudaIpcCloseMemHandle(void* memory) {
  {
    const Lock lock;
    if (const cudaError_t error = enter(); error != cudaSuccess) return error;
    World::Piece* const piece = piece_at(memory);
    if (piece == nullptr || piece->opened == 0) return done(cudaErrorInvalidValue);
  }
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  const Lock lock;
  --piece_at(memory)->opened;
  return cudaSuccess;
}
