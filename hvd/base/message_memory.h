#pragma once
/// MessageMemory is the allocator of messages' bytes. Blocks of messages between leaders are cached
/// for the next ones: to the C library they are large enough to be given back to the system, and
/// fresh pages cost more than what is copied into them. New bytes are not initialized. Any thread.
// Tested in tests/hvd/base/message_memory_test.cc

#include <cstddef>
#include <new>

#pragma GCC visibility push(default)
namespace hvd {

namespace message_memory {

/// The size of cached blocks, which also serve what is smaller, down to `kLeastBytes`.
inline constexpr std::size_t kBlockBytes = std::size_t{64} << 10;
inline constexpr std::size_t kLeastBytes = std::size_t{16} << 10;
/// The most that is cached; under AddressSanitizer, which would not see late uses, nothing.
inline constexpr std::size_t kCachedBytes = std::size_t{16} << 20;
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kCaches = false;
#else
inline constexpr bool kCaches = true;
#endif

/// Returns memory for so many bytes, aligned as `operator new` does. Throws std::bad_alloc.
void* allocate(std::size_t bytes);
/// Takes it back; `bytes` is what was asked for.
void free(void* memory, std::size_t bytes) noexcept;

}  // namespace message_memory

template <class T>
struct MessageMemory {
  using value_type = T;
  MessageMemory() = default;
  template <class U>
  MessageMemory(const MessageMemory<U>& /*other*/) noexcept {}
  T* allocate(std::size_t count) {
    return static_cast<T*>(message_memory::allocate(count * sizeof(T)));
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    message_memory::free(memory, count * sizeof(T));
  }
  /// Leaves new bytes as they are; what has a value is constructed as usual.
  template <class U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  bool operator==(const MessageMemory& /*other*/) const noexcept { return true; }
};

}  // namespace hvd
#pragma GCC visibility pop
