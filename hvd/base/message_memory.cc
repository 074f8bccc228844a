#include "hvd/base/message_memory.h"

#include <mutex>
#include <vector>

namespace hvd::message_memory {

namespace {

class Cache {
 public:
  Cache() { blocks_.reserve(kCachedBytes / kBlockBytes); }

  void* take() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || blocks_.empty()) return nullptr;
    void* const block = blocks_.back();
    blocks_.pop_back();
    return block;
  }
  [[nodiscard]] bool give(void* block) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || blocks_.size() == blocks_.capacity()) return false;
    blocks_.push_back(block);
    return true;
  }

 private:
  std::mutex mutex_;  // never waited for: a thread that had it may be missing after a fork
  std::vector<void*> blocks_;
};

/// Never destroyed: threads may outlive main().
Cache& cache() {
  static auto* const all = new Cache;
  return *all;
}

bool is_cached(std::size_t bytes) {
  return kCaches && bytes >= kLeastBytes && bytes <= kBlockBytes;
}

}  // namespace

void* allocate(std::size_t bytes) {
  if (!is_cached(bytes)) return ::operator new(bytes);
  void* const block = cache().take();
  return block != nullptr ? block : ::operator new(kBlockBytes);
}

void free(void* memory, std::size_t bytes) noexcept {
  if (!is_cached(bytes) || !cache().give(memory)) ::operator delete(memory);
}

}  // namespace hvd::message_memory
