#include "tests/gpu/double/world.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "tests/support/gpu/checks/poisoned_memory.h"
#include "tests/support/gpu/host_streams.h"

namespace hvd::gpu::test::cuda {

namespace {

constexpr std::uintptr_t kState = 0x210000000000;
constexpr std::size_t kStateBytes = std::size_t{2} << 30;
constexpr std::size_t kGranule = std::size_t{2} << 20;

std::atomic<bool> failed{false};
std::size_t errors_seen = 0;

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::abort();
}

int number_in(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

void map(std::uintptr_t at, std::size_t bytes, int access, int flags, int file,
         std::size_t offset) {
  void* const wanted = reinterpret_cast<void*>(at);
  const int all = flags | MAP_NORESERVE;
  if (mmap(wanted, bytes, access, all, file, static_cast<off_t>(offset)) != wanted)
    give_up("virtual GPU: mmap");
}

/// From lists of powers of two.
void* allocate(std::size_t bytes) {
  World& own = world();
  const auto size = std::max<std::size_t>(6, std::bit_width(bytes == 0 ? 0 : bytes - 1));
  const Lock lock;
  if (void* const taken = own.heap_free[size]; taken != nullptr) {
    std::memcpy(&own.heap_free[size], taken, sizeof(void*));
    return taken;
  }
  const std::uintptr_t taken = own.heap_end;
  own.heap_end += std::size_t{1} << size;
  if (own.heap_end > kState + kStateBytes) give_up("virtual GPU: no memory for its state");
  return reinterpret_cast<void*>(taken);
}

void release(void* memory, std::size_t bytes) {
  const auto size = std::max<std::size_t>(6, std::bit_width(bytes == 0 ? 0 : bytes - 1));
  const Lock lock;
  std::memcpy(memory, &world().heap_free[size], sizeof(void*));
  world().heap_free[size] = memory;
}

/// The first process makes the world.
void make(World* made) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&made->mutex, &attributes);
  made->heap_end = kState + (sizeof(World) + 4095) / 4096 * 4096;
  new (&made->cluster) HostCluster;
  for (World::Device& device : made->devices) new (&device) World::Device;
  made->ready = 1;
}

/// `fixed`: MAP_FIXED in place of what is mapped there, MAP_FIXED_NOREPLACE where nothing is.
void join(int file, int fixed) {
  if (file < 0 || flock(file, LOCK_EX) != 0) give_up("virtual GPU: HVD_TEST_GPU_WORLD");
  constexpr std::size_t kBefore = kStateBytes + kMostDevices * kDeviceBytes;
  if (ftruncate(file, static_cast<off_t>(kBefore + 2 * kMostProcesses * kManagedBytes)) != 0)
    give_up("virtual GPU: ftruncate");
  const int shared = MAP_SHARED | fixed, access = PROT_READ | PROT_WRITE;
  map(kState, kStateBytes, access, shared, file, 0);
  for (std::size_t device = 0; device < kMostDevices; ++device) {
    map(kDevices + device * kDeviceStride, kDeviceBytes, PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    map(kExecutorsDevices + device * kDeviceStride, kDeviceBytes, access, shared, file,
        kStateBytes + device * kDeviceBytes);
  }
  map(kManaged, 2 * kMostProcesses * kManagedBytes, access, shared, file, kBefore);
  place_state({allocate, release});
  if (world().ready == 0) make(&world());
  flock(file, LOCK_UN);
  close(file);
}

int nobodys_world() { return memfd_create("virtual GPUs", MFD_CLOEXEC); }

__attribute__((constructor)) void join() {
  const char* const name = std::getenv("HVD_TEST_GPU_WORLD");
  join(name == nullptr ? nobodys_world() : open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600),
       MAP_FIXED_NOREPLACE);
}

/// Whoever loads this is destroyed before.
__attribute__((destructor)) void leave() {
  if (failed) _exit(70);
}

}  // namespace

/// For a process that has just been forked, and uses no device yet: it, and those that it forks,
/// have a world of their own.
extern "C" __attribute__((visibility("default"))) void hvd_double_begin_anew() {
  join(nobodys_world(), MAP_FIXED);
}

int device_count() {
  static const int count = std::clamp(number_in("HVD_TEST_GPUS", 1), 0, kMostDevices);
  return count;
}

std::size_t device_bytes() {
  constexpr int kMebibytes = kDeviceBytes >> 20;
  static const int given = std::clamp(number_in("HVD_TEST_GPU_MIB", kMebibytes), 0, kMebibytes);
  return static_cast<std::size_t>(given) << 20;
}

int process() {
  static const int rank = number_in("OMPI_COMM_WORLD_RANK", number_in("RANK", 0));
  return rank;
}

World& world() { return *reinterpret_cast<World*>(kState); }

Lock::Lock() {
  // A process that has been killed leaves the state as it is.
  if (pthread_mutex_lock(&world().mutex) == EOWNERDEAD) pthread_mutex_consistent(&world().mutex);
}
Lock::~Lock() { pthread_mutex_unlock(&world().mutex); }

void complain(const std::string& misuse) {
  failed = true;
  std::fprintf(stderr, "virtual GPU (rank %d, HVD_TEST_GPU_SCHEDULE=%s): %s\n", process(),
               text_of(schedule_of_environment()).c_str(), misuse.c_str());
  if (std::getenv("HVD_TEST_GPU_OMIT") != nullptr) ::_exit(1);  // what is left out is found
}

void look_for_errors() {
  const auto errors = world().cluster.misuses();
  for (; errors_seen < errors.size(); ++errors_seen) complain(errors[errors_seen]);
}

void* take(int device, std::size_t bytes, const std::string& what) {
  World::Device& on = world().devices[device];
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
  const std::uintptr_t begin = kDevices + static_cast<std::uintptr_t>(device) * kDeviceStride;
  if (on.used + whole > device_bytes()) return nullptr;
  // What was freed last is used again last.
  const auto fits = [&](std::uintptr_t at) {
    const auto next = on.pieces.lower_bound(at);
    if (next != on.pieces.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at)
      return false;
    return at + whole <= begin + kDeviceBytes &&
           (next == on.pieces.end() || at + whole <= next->first);
  };
  std::uintptr_t at = std::max(on.next, begin);
  for (std::size_t step = 0; !fits(at); ++step, at += kGranule) {
    if (step > kDeviceBytes / kGranule) return nullptr;
    if (at + whole > begin + kDeviceBytes) at = begin - kGranule;
  }
  on.next = at + whole;
  on.used += whole;
  on.pieces[at] = {whole, process(), 0};
  void* const taken = reinterpret_cast<void*>(at);
  std::memset(to_executor(taken), PoisonedMemory::kByte, bytes);
  order().watch(taken, bytes, what);
  return taken;
}

bool give(void* memory, const std::string& call) {
  if (!is_device_memory(memory)) return false;
  World::Device& on = world().devices[device_of(memory)];
  const auto piece = on.pieces.find(number_of(memory));
  if (piece == on.pieces.end()) return false;
  if (piece->second.opened > 0) complain(call + " of memory that another process has open");
  if (piece->second.owner != process()) complain(call + " of another process's memory");
  order().free(memory, call);
  std::memset(to_executor(memory), PoisonedMemory::kByte, piece->second.bytes);
  on.used -= piece->second.bytes;
  on.pieces.erase(piece);
  return true;
}

World::Piece* piece_at(const void* memory, std::uintptr_t* begin) {
  if (!is_device_memory(memory)) return nullptr;
  World::Device& on = world().devices[device_of(memory)];
  const auto next = on.pieces.upper_bound(number_of(memory));
  if (next == on.pieces.begin()) return nullptr;
  const auto piece = std::prev(next);
  if (number_of(memory) >= piece->first + piece->second.bytes) return nullptr;
  if (begin != nullptr) *begin = piece->first;
  return &piece->second;
}

}  // namespace hvd::gpu::test::cuda
