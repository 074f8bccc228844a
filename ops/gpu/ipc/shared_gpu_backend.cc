#include "ops/gpu/ipc/shared_gpu_backend.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/errors.h"
#include "hvd/routes.h"
#include "ops/gpu/api/gpu_execution.h"
#include "ops/host_ops.h"

namespace hvd::gpu {

namespace {

// Of a location, beside the place: the memory is the user's; there is none, because this rank
// brings nothing; or because the GPU is full.
constexpr std::uint64_t kUsers = std::uint64_t{1} << 61;
constexpr std::uint64_t kNothing = std::uint64_t{1} << 60;
constexpr std::uint64_t kNoRoom = std::uint64_t{1} << 62;

bool is_block(std::uint64_t location) { return (location & (kUsers | kNothing | kNoRoom)) == 0; }

static_assert(SharedControl::kBatches == BatchPlaces::kPlaces,
              "a batch's place is given to another when all have left it");

class SharedGpuExecution : public Execution {
 public:
  SharedGpuExecution(SharedGpuBackend& backend, const CallContext& site,
                     std::vector<std::string_view> names, Batch batch)
      : backend_(backend),
        batch_(std::move(batch)),
        names_(std::move(names)),
        site_(site),
        state_(backend.board().batches().state(batch_.sequence)),
        turn_(backend.events().next()),
        completion_(site) {
    site_.tensors = names_;
    for (const int rank : batch_.ranks) indices_.push_back(backend_.domain_index(rank));
  }

  /// Packs, and does the batch for all if this rank is the last.
  void start() {
    require_room();
    wait_for_inputs(site_, backend_.stream(), batch_);
    pack();
    backend_.events().at(turn_).packed.record(site_, backend_.stream());
    auto& turns = backend_.control(backend_.self()).packed_turn;
    turns[batch_.sequence % turns.size()] = static_cast<std::uint32_t>(turn_);
    const bool is_last =
        state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == batch_.ranks.size();
    if (!is_last) return;
    if (batch_.traits.kind == OpKind::Allreduce) reduce_for_all();
    ring_the_others();
  }

  [[nodiscard]] std::optional<Route> route() const override { return Route::SharedGpu; }
  Progress advance() override {
    if (stage_ == Stage::Done) return Progress::Done;
    const DeviceGuard guard(site_);
    const Progress progress = stage_ == Stage::Gathering ? gather() : Progress::Idle;
    if (stage_ == Stage::Finishing && happened(site_, completion_)) {
      stage_ = Stage::Done;
      give_back();
      return Progress::Done;
    }
    return progress;
  }

  void* completion_event() override { return completion_.get(); }
  [[nodiscard]] bool is_enqueued() const override { return stage_ != Stage::Gathering; }
  // by the rank that arrives last
  [[nodiscard]] bool is_rung() const override { return stage_ == Stage::Gathering; }

 private:
  enum class Stage : std::uint8_t { Gathering, Finishing, Done };

  [[nodiscard]] std::uint64_t location(std::size_t member, int index) const {
    return batch_.members[member].locations[static_cast<std::size_t>(index)];
  }
  std::byte* address(std::size_t member, int index) {
    return backend_.address(site_, index, location(member, index));
  }
  void copy(const std::vector<CopyItem>& items) {
    if (items.empty()) return;
    const CopyJob job{.items = items, .from = batch_.traits.dtype, .to = batch_.traits.dtype};
    check(site_, site_.table->batched_copy(job, backend_.stream().get()), "launch_batched_copy");
  }

  void require_room() const {
    for (std::size_t m = 0; m < batch_.members.size(); ++m)
      for (std::size_t i = 0; i < indices_.size(); ++i)
        if (location(m, indices_[i]) == kNoRoom)
          fail(site_, "an allocation on the shared GPU",
               formatted("rank {} has no place for '{}' ({}){}{}", batch_.ranks[i],
                         batch_.members[m].name,
                         to_mib(bytes_of(batch_.traits, batch_.members[m].count)),
                         indices_[i] == backend_.self() ? ": " : "",
                         indices_[i] == backend_.self() ? backend_.refusal() : std::string()));
  }

  void pack() {
    const int self = backend_.self();
    std::vector<CopyItem> items;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const BatchMember& member = batch_.members[m];
      if (member.count == 0 || (location(m, self) & kNothing) != 0) continue;
      std::byte* to = address(m, self);
      if (to != member.input) items.push_back({member.input, to, member.count});
    }
    copy(items);
  }

  /// The stream goes on when every other rank's pack is done.
  void wait_for_packs(const std::vector<int>& indices) {
    for (const int index : indices) {
      if (index == backend_.self()) continue;
      const auto& turns = backend_.control(index).packed_turn;
      backend_.stream().wait_for(
          site_, backend_.peers().packed(site_, index, turns[batch_.sequence % turns.size()]));
    }
  }

  [[nodiscard]] ReduceJob job() const {
    const kernels::Reduction reduction = reduction_of(batch_.traits);
    ReduceJob made;
    made.ins = static_cast<int>(indices_.size());
    made.dtype = batch_.traits.dtype;
    made.op = batch_.traits.op;
    made.prescale = reduction.prescale;
    made.postscale = reduction.postscale;
    made.divisor = reduction.divisor;
    made.zeros = indices_.size() < batch_.traits.set->ranks.size() &&
                 !zeros_change_nothing(batch_.traits.op);
    return made;
  }
  void reduce(const ReduceJob& job) {
    if (!job.counts.empty())
      check(site_, site_.table->shared_reduce(job, backend_.stream().get()),
            "launch_shared_reduce");
  }

  void reduce_for_all() {
    wait_for_packs(indices_);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<std::int64_t> counts;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      if (batch_.members[m].count == 0) continue;
      counts.push_back(batch_.members[m].count);
      for (const int index : indices_) {
        outputs.push_back(address(m, index));
        inputs.push_back(outputs.back());
      }
    }
    ReduceJob all = job();
    all.inputs = inputs;
    all.outputs = outputs;
    all.counts = counts;
    all.outs = all.ins;
    reduce(all);
    backend_.events().at(turn_).reduced.record(site_, backend_.stream());
    unpack();
    state_.next_chunk.store(
        static_cast<std::uint64_t>(backend_.self()) * SharedControl::kEvents + turn_,
        std::memory_order_relaxed);
    state_.complete.store(true, std::memory_order_release);
  }
  /// They may go on: whoever waits there, or, where nobody does, their coordination threads.
  void ring_the_others() {
    for (const int index : indices_)
      if (index != backend_.self()) backend_.board().bells().ring_worker(index);
    backend_.board().bells().ring_waiters();
  }

  /// Does what can be done while other ranks are awaited.
  Progress gather() {
    if (batch_.traits.kind == OpKind::Allreduce) {
      if (!state_.complete.load(std::memory_order_acquire)) return still_waiting();
      const std::uint64_t leader = state_.next_chunk.load(std::memory_order_relaxed);
      backend_.stream().wait_for(
          site_, backend_.peers().reduced(site_, static_cast<int>(leader / SharedControl::kEvents),
                                          leader % SharedControl::kEvents));
      unpack();
    } else {
      if (state_.finished.load(std::memory_order_acquire) < batch_.ranks.size())
        return still_waiting();
      pull();
      completed();
    }
    return Progress::Advanced;
  }
  Progress still_waiting() {
    // an error of this GPU is noticed when this thread looks at all
    static_cast<void>(happened(site_, backend_.events().at(turn_).packed));
    return Progress::Idle;
  }

  void unpack() {
    std::vector<CopyItem> items;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const BatchMember& member = batch_.members[m];
      if (member.count > 0 && is_block(location(m, backend_.self())))
        items.push_back({address(m, backend_.self()), member.output, member.count});
    }
    copy(items);
    completed();
  }
  void completed() {
    completion_.record(site_, backend_.stream());
    stage_ = Stage::Finishing;
  }

  void pull() {
    switch (batch_.traits.kind) {
      case OpKind::Broadcast: return pull_from_root();
      case OpKind::Reducescatter: return pull_and_reduce();
      default: return pull_parts();
    }
  }

  void pull_from_root() {
    const int root = backend_.domain_index(batch_.traits.root);
    wait_for_packs({root});
    std::vector<CopyItem> items;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const BatchMember& member = batch_.members[m];
      const bool has_it = root == backend_.self() && member.output == member.input;
      if (member.count > 0 && !has_it)
        items.push_back({address(m, root), member.output, member.count});
    }
    copy(items);
  }

  /// Allgather and alltoall.
  void pull_parts() {
    wait_for_packs(indices_);
    std::vector<CopyItem> items;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const BatchMember& member = batch_.members[m];
      auto* to = static_cast<std::byte*>(member.output);
      for (std::size_t place = 0; place < indices_.size(); ++place) {
        const std::size_t skipped =
            member.offsets.empty() ? 0 : bytes_of(batch_.traits, member.offsets[place]);
        if (member.counts[place] > 0)
          items.push_back({address(m, indices_[place]) + skipped, to, member.counts[place]});
        to += bytes_of(batch_.traits, member.counts[place]);
      }
    }
    copy(items);
  }

  void pull_and_reduce() {
    wait_for_packs(indices_);
    const auto place = static_cast<std::size_t>(batch_.traits.set->rank);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<std::int64_t> counts;
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const BatchMember& member = batch_.members[m];
      const auto own = member.counts.begin() + static_cast<std::ptrdiff_t>(place);
      if (*own == 0) continue;
      const std::size_t skipped =
          bytes_of(batch_.traits, std::accumulate(member.counts.begin(), own, std::int64_t{0}));
      for (const int index : indices_) inputs.push_back(address(m, index) + skipped);
      outputs.push_back(member.output);
      counts.push_back(*own);
    }
    ReduceJob mine = job();
    mine.inputs = inputs;
    mine.outputs = outputs;
    mine.counts = counts;
    reduce(mine);
  }

  /// Nobody looks at this rank's blocks after an allreduce; otherwise the others may still be at
  /// it.
  void give_back() {
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      const std::uint64_t mine = location(m, backend_.self());
      if (batch_.traits.kind == OpKind::Allreduce) {
        backend_.release(batch_.traits, mine);
      } else {
        backend_.release_later(batch_.sequence, mine);
      }
    }
  }

  SharedGpuBackend& backend_;
  const Batch batch_;
  const std::vector<std::string_view> names_;
  CallContext site_;
  BatchState& state_;
  const std::size_t turn_;
  Event completion_;
  std::vector<int> indices_;  ///< in the domain, of the ranks that take part, in their order
  Stage stage_ = Stage::Gathering;
};

}  // namespace

SharedGpuBackend::SharedGpuBackend(const GpuApi& table, int device, Board& board, Topology topology,
                                   std::vector<SharedControl*> controls, SharedGpuOptions options)
    : table_(table),
      device_(device),
      board_(board),
      topology_(std::move(topology)),
      controls_(std::move(controls)),
      options_(std::move(options)),
      pool_(std::make_shared<DevicePool>(
          CallContext{.table = &table, .rank = topology_.rank, .device = device, .tensors = {}},
          control(self()))),
      peers_(std::make_shared<Peers>(controls_, self())),
      events_(std::make_shared<OwnEvents>(control(self()))) {}

SharedGpuBackend::~SharedGpuBackend() {
  // What `abort` has waited for in vain ends with the process. Without a failure nothing is under
  // way: each batch was awaited before it was over.
  if (is_stuck_) {
    // a stream may wait for an event of a rank that has died, which never comes; closing would wait
    // with it
    keep_for_ever(peers_);
  } else {
    peers_->close();
  }
  // Neither memory nor events must be let go while another process has them open.
  const auto deadline = std::chrono::steady_clock::now() + options_.rest_limit;
  const bool used = pool_->slabs() > 0 || events_->made();
  while (!is_stuck_ && used && !peers_->all_closed() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (!is_stuck_ && (!used || peers_->all_closed())) return;
  keep_for_ever(pool_);
  keep_for_ever(events_);
}

bool SharedGpuBackend::supports(const BatchTraits& traits) const {
  return traits.device.kind == DeviceKind::Cuda &&
         (!options_.takes || options_.takes(*traits.set)) &&
         moves_or_reduces(traits, reduce_supported);
}

std::uint64_t SharedGpuBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  if (traits.kind == OpKind::Broadcast && traits.root != topology_.rank) return kNothing;
  if (traits.kind == OpKind::Allreduce) {
    if (const auto place = pool_->find(member.output)) return place->word() | kUsers;
  }
  release_over();
  try {
    const std::byte* block = pool_->allocate(bytes_of(traits, member.count));
    if (block != nullptr) return pool_->find(block)->word();
    std::size_t free_bytes = 0, total_bytes = 0;
    const DeviceGuard guard(table_, device_);
    const bool known = table_.mem_info(&free_bytes, &total_bytes) == CudaCode::Success;
    note_refusal(known ? formatted("out of memory, {} of {} are free", to_mib(free_bytes),
                                   to_mib(total_bytes))
                       : "out of memory");
  } catch (const BackendError& error) {
    note_refusal(error.what());
  }
  return kNoRoom;
}

void SharedGpuBackend::note_refusal(const std::string& words) {
  const std::lock_guard lock(mutex_);
  if (refusal_.empty()) refusal_ = words;
}

void SharedGpuBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept {
  if (is_block(location)) pool_->free(pool_->at(PoolPlace::of(location)));
}

std::shared_ptr<void> SharedGpuBackend::allocate(const BatchTraits& traits, std::size_t bytes) {
  if (traits.device.index != device_) return nullptr;
  try {
    std::byte* block = pool_->allocate(bytes);
    if (block != nullptr) return {block, [pool = pool_](void* memory) { pool->free(memory); }};
  } catch (const BackendError& error) {
    note_refusal(error.what());
  }
  return nullptr;
}

std::byte* SharedGpuBackend::address(const CallContext& site, int index, std::uint64_t location) {
  const PoolPlace place = PoolPlace::of(location);
  return index == self() ? pool_->at(place) : peers_->memory(site, index, place);
}

void SharedGpuBackend::release_later(std::uint64_t sequence, std::uint64_t location) {
  if (!is_block(location)) return;
  const std::lock_guard lock(mutex_);
  deferred_.push_back({sequence, location});
}

void SharedGpuBackend::release_over() {
  const std::lock_guard lock(mutex_);
  std::erase_if(deferred_, [this](const Deferred& deferred) {
    if (!board_.batches().is_over(deferred.sequence)) return false;
    release({}, deferred.location);
    return true;
  });
}

std::unique_ptr<Execution> SharedGpuBackend::launch(Batch batch) {
  const auto names = names_of(batch);
  const CallContext site{
      .table = &table_, .rank = topology_.rank, .device = device_, .tensors = names};
  if (failed_) fail(site, "a batch on the shared GPU", "given up after an earlier failure");
  try {
    const DeviceGuard guard(site);
    stream_.create(site);
    events_->make(site);
    auto execution = std::make_unique<SharedGpuExecution>(*this, site, names, std::move(batch));
    execution->start();
    return execution;
  } catch (...) {
    failed_ = true;
    throw;
  }
}

bool SharedGpuBackend::abort() noexcept {
  failed_ = true;
  is_stuck_ = !comes_to_rest(table_, device_, stream_, options_.rest_limit);
  return !is_stuck_;
}

}  // namespace hvd::gpu
