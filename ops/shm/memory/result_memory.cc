#include "ops/shm/memory/result_memory.h"

#include <sys/mman.h>

#include <utility>

namespace hvd {

namespace {

class ArenaResults final : public ResultMemory {
 public:
  ArenaResults(std::shared_ptr<Arena> arena, std::shared_ptr<void> owner)
      : arena_(std::move(arena)), owner_(std::move(owner)) {}
  std::byte* allocate(std::size_t bytes) override { return arena_->try_allocate(bytes); }
  void give_back(std::byte* block, std::size_t bytes) noexcept override {
    // a hole in the shared file; an arena in ordinary memory, as tests have it, keeps its pages
    ::madvise(block, bytes, MADV_REMOVE);
    arena_->free(block);
  }
  [[nodiscard]] bool is_seen_by_children() const override { return true; }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<void> owner_;
};

class PrivateResults final : public ResultMemory {
 public:
  std::byte* allocate(std::size_t bytes) override {
    void* const block =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? nullptr : static_cast<std::byte*>(block);
  }
  void give_back(std::byte* block, std::size_t bytes) noexcept override { ::munmap(block, bytes); }
};

}  // namespace

std::shared_ptr<ResultMemory> arena_results(std::shared_ptr<Arena> arena,
                                            std::shared_ptr<void> owner) {
  return std::make_shared<ArenaResults>(std::move(arena), std::move(owner));
}
std::shared_ptr<ResultMemory> private_results() { return std::make_shared<PrivateResults>(); }

}  // namespace hvd
