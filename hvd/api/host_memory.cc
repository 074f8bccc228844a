#include "hvd/api/host_memory.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "hvd/api/world.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/engine/core/caller_threads.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

/// The header before the memory:
///   bytes 0-3   users   ranks that hold it, or have yet to open it
///   bytes 4-63  unused  so that the memory begins on a cache line
struct Header {
  std::atomic<std::uint32_t> users;
};
constexpr std::size_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes && std::atomic<std::uint32_t>::is_always_lock_free);

/// The blocks that this rank has made, each until nobody holds it, or its world has ended: who has
/// died holds it for good, and nobody opens or reuses it then.
class Made {
 public:
  void add(const std::shared_ptr<RunningWorld>& world, std::shared_ptr<void> memory) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back({world, std::move(memory)});
  }
  void give_back() {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [](const Block& block) {
      return block.world.expired() ||
             static_cast<Header*>(block.memory.get())->users.load(std::memory_order_acquire) == 0;
    });
  }

 private:
  struct Block {
    std::weak_ptr<RunningWorld> world;
    std::shared_ptr<void> memory;
  };
  std::mutex mutex_;
  std::vector<Block> blocks_;
};
Made& made() {
  static auto* const all = new Made;  // tensors of the user's may go after everything static
  return *all;
}

/// `block` begins with the header.
std::shared_ptr<void> used(std::shared_ptr<void> block) {
  std::byte* const data = static_cast<std::byte*>(block.get()) + kHeaderBytes;
  return {data, [block = std::move(block), here = MadeHere()](void*) {
            if (!here.still_here()) return;  // a child that was forked from the rank
            static_cast<Header*>(block.get())->users.fetch_sub(1, std::memory_order_release);
          }};
}

}  // namespace

void trim_host_memory() noexcept {
  const InsideLibrary inside;
  if (const auto world = current_world_if_any(); world && world->trim_shared) world->trim_shared();
}

HostMemory allocate_for_host(std::size_t bytes, int others) {
  const LibraryCall call;
  made().give_back();
  const auto world = current_world();
  if (!world->allocate_shared) return {};
  const auto block = world->allocate_shared(bytes + kHeaderBytes);
  if (!block) return {};
  new (block.get()) Header{static_cast<std::uint32_t>(others) + 1};
  made().add(world, block);
  return {used(block), world->shared_place(block.get())};
}

std::shared_ptr<void> open_host_memory(int maker, std::uint64_t place) {
  const LibraryCall call;
  const auto world = current_world();
  auto block = world->shared_at ? world->shared_at(maker, place) : nullptr;
  if (!block)
    throw InvalidArgument(
        formatted("rank {} and rank {} share no memory", world->engine->topology().rank, maker));
  return used(std::move(block));
}

}  // namespace hvd
