#include "torch_bindings/gradients/gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/api/host_memory.h"
#include "hvd/api/world.h"
#include "hvd/base/child_watch.h"
#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/hvd.h"

namespace hvd::detail {

namespace {

constexpr std::size_t kLeastBytes = std::size_t{4} << 10;  // less is copied faster than it is found

/// Returns the leaf of so many bytes whose gradient may be what the node of a backward pass makes:
/// it goes there at once, or through nodes that pass on one thing (a transpose, a view, a product
/// with a number). Null if there is none.
const void* leaf_after(const torch::autograd::Node& node, std::size_t bytes) {
  using torch::autograd::AccumulateGrad;
  constexpr int kMostNodes = 6;
  const auto leaf_of = [bytes](const torch::autograd::Node* at) -> const void* {
    const auto* const end = dynamic_cast<const AccumulateGrad*>(at);
    const bool fits = end != nullptr && end->variable.defined() && end->variable.nbytes() == bytes;
    return fits ? end->variable.unsafeGetTensorImpl() : nullptr;
  };
  if (const void* const leaf = leaf_of(&node)) return leaf;
  for (const auto& edge : node.next_edges()) {
    const torch::autograd::Node* at = edge.function.get();
    for (int i = 0; i < kMostNodes && at != nullptr && at->num_outputs() == 1; ++i)
      at = at->next_edge(0).function.get();
    if (const void* const leaf = leaf_of(at)) return leaf;
  }
  return nullptr;
}

class GradientAllocator final : public c10::Allocator {
 public:
  static GradientAllocator& instance() {
    // tensors of the user's may go after everything static
    static auto* const only = new GradientAllocator;
    return *only;
  }

  /// `times`: 1 for one more of that leaf, -1 for one less.
  void announce(const void* leaf, std::size_t bytes, int times) {
    // another thread may have held the mutex when this child was forked
    if (!made_.still_here()) return;
    Blocks gone;
    const std::lock_guard lock(mutex_);
    announced_places_[place_of(bytes)].fetch_add(times, std::memory_order_relaxed);
    const std::size_t room = kBlocksPerGradient * bytes;
    if (const auto announced = leaves_.insert({leaf, 0}).first; (announced->second += times) == 0)
      leaves_.erase(announced);
    if (times > 0) {
      most_bytes_ += room;
      ++sizes_[bytes].announced;
      return say_if_replaced();
    }
    most_bytes_ -= room;
    const auto size = sizes_.find(bytes);
    if (--size->second.announced > 0) return;
    gone = std::move(size->second.free);
    all_bytes_ -= gone.size() * bytes;
    sizes_.erase(size);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kLeastBytes &&
        announced_places_[place_of(bytes)].load(std::memory_order_relaxed) > 0 &&
        made_.still_here())
      if (const auto node = torch::autograd::get_current_node())
        if (const void* const leaf = leaf_after(*node, bytes))
          if (void* const data = take(leaf, bytes))
            return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
    return before_->allocate(bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &give_back_raw; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Returns whether `data` is the beginning of a block of this world that nobody but `owner`
  /// reduces in. It is `owner`'s from then on.
  [[nodiscard]] bool adopt(const void* data, const void* owner) {
    if (!made_.still_here()) return false;
    const std::lock_guard lock(mutex_);
    const auto block = used_.find(data);
    if (block == used_.end() || block->second.world != world_) return false;
    if (block->second.owner != nullptr && block->second.owner != owner) return false;
    block->second.owner = owner;
    return true;
  }
  /// Returns whether memory with that deleter is one of the blocks, and not shared in a way of
  /// LibTorch's own (copied when it is written to).
  [[nodiscard]] static bool is_deleter(c10::DeleterFnPtr deleter) { return deleter == &give_back; }

 private:
  // `.grad` of the last step may live until that of the next is there
  static constexpr std::size_t kBlocksPerGradient = 2;

  using Blocks = std::vector<std::shared_ptr<void>>;
  struct Size {
    int announced = 0;
    Blocks free;
  };
  struct Used {
    std::shared_ptr<void> block;
    std::size_t bytes;
    std::uint64_t world;
    std::uint64_t born;  ///< the last fork before, see ChildWatch
    const void* owner = nullptr;
  };
  struct Seen {
    std::shared_ptr<void> block;
    std::size_t bytes;
    std::uint64_t born, ended;
  };

  GradientAllocator() : before_(c10::GetCPUAllocator()) {
    on_init([this] { begin_world(); });
    // With the least priority that takes effect, so that one the program sets later with that of
    // the one before is not ignored.
    for (int priority = 0; priority <= kMostPriority && c10::GetCPUAllocator() != this; ++priority)
      c10::SetCPUAllocator(this, static_cast<std::uint8_t>(priority));
  }

  void say_if_replaced() {
    if (c10::GetCPUAllocator() == this || std::exchange(said_replaced_, true)) return;
    log(LogLevel::Info,
        "the program has set a CPU allocator of its own: gradients are copied into shared memory, "
        "not made there");
  }

  /// A world begins: blocks of the one before are of no use any more.
  void begin_world() {
    if (!made_.still_here()) return;
    std::vector<Blocks> gone;
    const std::lock_guard lock(mutex_);
    ++world_;
    all_bytes_ = 0;
    for (auto& [bytes, size] : sizes_) gone.push_back(std::exchange(size.free, {}));
  }

  static constexpr int kMostPriority = 0xFF;  // of LibTorch's allocators
  static constexpr std::size_t kPlaces = 1024;
  // Fibonacci hashing, 10 bits
  static std::size_t place_of(std::size_t bytes) { return (bytes * 0x9E3779B97F4A7C15U) >> 54; }

  /// Returns a block, or null where there is none to have.
  void* take(const void* leaf, std::size_t bytes) {
    std::uint64_t world = 0;
    std::vector<Blocks> gone;
    {
      const std::lock_guard lock(mutex_);
      const auto size = sizes_.find(bytes);
      if (size == sizes_.end() || !leaves_.contains(leaf)) return nullptr;
      keep_unseen();
      if (Blocks& free = size->second.free; !free.empty()) {
        auto block = std::move(free.back());
        free.pop_back();
        return hand_out(std::move(block), bytes);
      }
      // what is kept of other sizes goes where it is in the way
      for (auto& [other, its] : sizes_) {
        if (all_bytes_ + bytes <= most_bytes_) break;
        all_bytes_ -= its.free.size() * other;
        gone.push_back(std::exchange(its.free, {}));
      }
      if (all_bytes_ + bytes > most_bytes_) return nullptr;
      all_bytes_ += bytes;
      world = world_;
    }
    gone.clear();
    std::shared_ptr<void> block;
    try {
      block = allocate_shared(bytes);
    } catch (const Error&) {  // after shutdown()
    }
    const std::lock_guard lock(mutex_);
    if (block && world == world_) return hand_out(std::move(block), bytes);
    if (world == world_) all_bytes_ -= bytes;
    return nullptr;
  }

  /// Requires the mutex.
  void* hand_out(std::shared_ptr<void> block, std::size_t bytes) {
    void* const data = block.get();
    used_.insert_or_assign(data,
                           Used{std::move(block), bytes, world_, ChildWatch::instance().begin()});
    return data;
  }

  /// Keeps the blocks that no child sees any more. Requires the mutex.
  void keep_unseen() {
    std::erase_if(seen_, [this](Seen& seen) {
      if (!ChildWatch::instance().are_gone(seen.born, seen.ended)) return false;
      const auto size = sizes_.find(seen.bytes);
      if (size != sizes_.end() && all_bytes_ + seen.bytes <= most_bytes_) {
        all_bytes_ += seen.bytes;
        size->second.free.push_back(std::move(seen.block));
      }
      return true;
    });
  }

  static void give_back(void* data) {
    GradientAllocator& self = instance();
    if (!self.made_.still_here()) return;  // a child that was forked from the rank
    self.take_back(data);
  }

  /// For those who hold memory without its deleter: it may be LibTorch's own.
  static void give_back_raw(void* data) {
    GradientAllocator& self = instance();
    if (!self.made_.still_here() || !self.take_back(data)) self.before_->raw_deleter()(data);
  }

  bool take_back(void* data) {
    std::shared_ptr<void> gone;
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(data);
    if (found == used_.end()) return false;
    const Used used = std::move(found->second);
    used_.erase(found);
    const std::uint64_t ended = ChildWatch::instance().end();
    gone = used.block;
    if (used.world != world_) return true;
    const auto size = sizes_.find(used.bytes);
    if (size != sizes_.end() && ChildWatch::instance().are_gone(used.born, ended)) {
      size->second.free.push_back(used.block);
      return true;
    }
    all_bytes_ -= used.bytes;
    if (size != sizes_.end()) seen_.push_back({used.block, used.bytes, used.born, ended});
    return true;
  }

  c10::Allocator* const before_;
  const MadeHere made_;
  // by hash of the size: a first look without the mutex
  std::array<std::atomic<int>, kPlaces> announced_places_{};
  std::mutex mutex_;
  std::uint64_t world_ = 0;
  bool said_replaced_ = false;
  std::size_t most_bytes_ = 0;
  // of this world's blocks, free or not, but for those that children see
  std::size_t all_bytes_ = 0;
  std::unordered_map<const void*, int> leaves_;
  std::unordered_map<std::size_t, Size> sizes_;
  std::unordered_map<const void*, Used> used_;
  std::vector<Seen> seen_;
};

}  // namespace

HostMemoryUser::~HostMemoryUser() { trim_host_memory(); }

AnnouncedGradient::AnnouncedGradient(const at::Tensor& parameter)
    : leaf_(parameter.unsafeGetTensorImpl()), bytes_(parameter.nbytes()) {
  GradientAllocator::instance().announce(leaf_, bytes_, 1);
}
AnnouncedGradient::~AnnouncedGradient() {
  GradientAllocator::instance().announce(leaf_, bytes_, -1);
}

bool stays_in_shared_memory(const at::Tensor& gradient, const void* owner, bool just_given) {
  if (gradient.nbytes() < kLeastBytes) return false;
  // Beside `.grad` there is autograd's own reference to what it has just given, at most.
  const auto& storage = gradient.storage();
  if (gradient.use_count() != 1 || storage.use_count() > (just_given ? 2U : 1U) ||
      storage.nbytes() != gradient.nbytes())
    return false;
  return GradientAllocator::is_deleter(storage.data_ptr().get_deleter()) &&
         GradientAllocator::instance().adopt(storage.data(), owner);
}

}  // namespace hvd::detail
