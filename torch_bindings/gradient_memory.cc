#include "torch_bindings/gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/api/world.h"
#include "hvd/base/process.h"
#include "hvd/hvd.h"

namespace hvd::detail {

namespace {

constexpr std::size_t kLeastBytes = std::size_t{4} << 10;  // less is copied faster than it is found

class GradientAllocator final : public c10::Allocator {
 public:
  static GradientAllocator& instance() {
    static auto* const only = new GradientAllocator;  // tensors of the user's may go after everything static
    return *only;
  }

  /// `times`: 1 for one more of that size, -1 for one less.
  void announce(std::size_t bytes, int times) {
    if (!made_.still_here()) return;  // another thread may have held the mutex when this child was forked
    Blocks gone;
    const std::lock_guard lock(mutex_);
    announced_places_[place_of(bytes)].fetch_add(times, std::memory_order_relaxed);
    const std::size_t room = kBlocksPerGradient * bytes;
    if (times > 0) {
      most_bytes_ += room;
      ++sizes_[bytes].announced;
      return;
    }
    most_bytes_ -= room;
    const auto size = sizes_.find(bytes);
    if (--size->second.announced > 0) return;
    gone = std::move(size->second.free);
    sizes_.erase(size);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kLeastBytes && announced_places_[place_of(bytes)].load(std::memory_order_relaxed) > 0 && made_.still_here() &&
        torch::autograd::get_current_node())
      if (void* const data = take(bytes)) return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
    return before_->allocate(bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &give_back_raw; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  /// Whether `data` is the beginning of a block of this world.
  [[nodiscard]] bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto block = used_.find(data);
    return block != used_.end() && block->second.world == world_;
  }

 private:
  static constexpr std::size_t kBlocksPerGradient = 2;  // `.grad` of the last step may live until that of the next is there

  using Blocks = std::vector<std::shared_ptr<void>>;
  struct Size {
    int announced = 0;
    Blocks free;
  };
  struct Used {
    std::shared_ptr<void> block;
    std::size_t bytes;
    std::uint64_t world;
  };

  GradientAllocator() : before_(c10::GetCPUAllocator()) {
    on_init([this] { begin_world(); });
    c10::SetCPUAllocator(this, kOverAll);
  }

  /// A world begins: blocks of the one before are of no use any more.
  void begin_world() {
    std::vector<Blocks> gone;
    const std::lock_guard lock(mutex_);
    ++world_;
    for (auto& [bytes, size] : sizes_) gone.push_back(std::move(size.free));
    for (auto& [bytes, size] : sizes_) size.free.clear();
  }

  static constexpr std::uint8_t kOverAll = 0xFF;  // LibTorch's priorities of allocators end there
  static constexpr std::size_t kPlaces = 1024;
  static std::size_t place_of(std::size_t bytes) { return (bytes * 0x9E3779B97F4A7C15U) >> 54; }  // Fibonacci hashing, 10 bits

  /// Returns a block, or null where there is none to have.
  void* take(std::size_t bytes) {
    std::uint64_t world = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto size = sizes_.find(bytes);
      if (size == sizes_.end() || taken_bytes_ + bytes > most_bytes_) return nullptr;
      if (Blocks& free = size->second.free; !free.empty()) {
        auto block = std::move(free.back());
        free.pop_back();
        return hand_out(std::move(block), bytes);
      }
      world = world_;
    }
    std::shared_ptr<void> block;
    try {
      block = allocate_shared(bytes);
    } catch (const Error&) {  // after shutdown()
    }
    if (!block) return nullptr;
    const std::lock_guard lock(mutex_);
    return world == world_ ? hand_out(std::move(block), bytes) : nullptr;
  }

  /// Requires the mutex.
  void* hand_out(std::shared_ptr<void> block, std::size_t bytes) {
    void* const data = block.get();
    taken_bytes_ += bytes;
    used_.insert_or_assign(data, Used{std::move(block), bytes, world_});
    return data;
  }

  static void give_back(void* data) {
    GradientAllocator& self = instance();
    if (!self.made_.still_here()) return;  // a child that was forked from the rank
    self.take_back(data);
  }

  /// For those who hold memory without its deleter: it may be LibTorch's own.
  static void give_back_raw(void* data) {
    GradientAllocator& self = instance();
    if (!self.take_back(data)) self.before_->raw_deleter()(data);
  }

  bool take_back(void* data) {
    std::shared_ptr<void> gone;
    const std::lock_guard lock(mutex_);
    const auto used = used_.find(data);
    if (used == used_.end()) return false;
    gone = std::move(used->second.block);
    const std::size_t bytes = used->second.bytes;
    const bool of_this_world = used->second.world == world_;
    used_.erase(used);
    taken_bytes_ -= bytes;
    const auto size = sizes_.find(bytes);
    if (size != sizes_.end() && of_this_world) size->second.free.push_back(std::move(gone));
    return true;
  }

  c10::Allocator* const before_;
  const MadeHere made_;
  std::array<std::atomic<int>, kPlaces> announced_places_{};  // by hash of the size: a first look without the mutex
  std::mutex mutex_;
  std::uint64_t world_ = 0;
  std::size_t most_bytes_ = 0, taken_bytes_ = 0;
  std::unordered_map<std::size_t, Size> sizes_;
  std::unordered_map<const void*, Used> used_;
};

}  // namespace

AnnouncedGradient::AnnouncedGradient(std::size_t bytes) : bytes_(bytes) { GradientAllocator::instance().announce(bytes_, 1); }
AnnouncedGradient::~AnnouncedGradient() { GradientAllocator::instance().announce(bytes_, -1); }

bool was_made_in_shared_memory(const at::Tensor& gradient) {
  if (gradient.nbytes() < kLeastBytes || gradient.is_conj() || gradient.is_neg()) return false;
  // `.grad`, and autograd's own reference to what it has just given.
  const auto& storage = gradient.storage();
  return storage.use_count() <= 2 && storage.nbytes() == gradient.nbytes() && GradientAllocator::instance().has(storage.data());
}

}  // namespace hvd::detail
