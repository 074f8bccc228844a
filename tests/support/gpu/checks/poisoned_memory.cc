#include "tests/support/gpu/checks/poisoned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

namespace hvd::gpu::test {

namespace {

constexpr std::size_t kChunk = std::size_t{1} << 21;

/// A file of poison, a chunk long, that all such memory shows until it is written.
int poison_file() {
  static const int file = [] {
    const int made = memfd_create("poison", MFD_CLOEXEC);
    const std::vector<std::uint8_t> poison(kChunk, PoisonedMemory::kByte);
    if (made < 0 || write(made, poison.data(), kChunk) != static_cast<ssize_t>(kChunk))
      throw std::bad_alloc();
    return made;
  }();
  return file;
}

std::size_t in_whole_pages(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  return (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

}  // namespace

PoisonedMemory::PoisonedMemory(std::size_t bytes) : bytes_(bytes) {
  void* const made = mmap(nullptr, in_whole_pages(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw std::bad_alloc();
  data_ = made;
  poison();
}

PoisonedMemory::PoisonedMemory(PoisonedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PoisonedMemory::~PoisonedMemory() {
  if (data_ != nullptr) munmap(data_, in_whole_pages(bytes_));
}

void PoisonedMemory::poison() {
  auto* const begin = static_cast<std::byte*>(data_);
  const std::size_t whole = in_whole_pages(bytes_);
  for (std::size_t at = 0; at < whole; at += kChunk) {
    const std::size_t piece = std::min(kChunk, whole - at);
    if (mmap(begin + at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, poison_file(),
             0) == MAP_FAILED)
      throw std::bad_alloc();
  }
}

}  // namespace hvd::gpu::test
