#include "ops/gpu/staged/staged_backend.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/routes.h"
#include "ops/gpu/api/handles.h"
#include "ops/host_ops.h"

namespace hvd::gpu {

namespace {

/// The bit of a location that means nothing to the others, who do not look there.
constexpr std::uint64_t kTicket = std::uint64_t{1} << 59;

BatchTraits on_host(const BatchTraits& traits) {
  BatchTraits made = traits;
  made.device = {};
  return made;
}

void tell_refused(const std::string& why) {
  log(LogLevel::Info,
      "staged GPU tensors go through memory that is not registered with CUDA, which is slower: {}",
      why);
}

class StagedExecution : public Execution {
 public:
  /// The place of a tensor that it goes to when the host is done.
  struct Output {
    std::shared_ptr<std::byte> from;
    std::shared_ptr<std::byte> input;  ///< kept as long
    void* to;
    std::size_t bytes;
    CudaEvent* ready;  ///< what the output's stream had to do before the operation; null: nothing
  };

  StagedExecution(StagedBackend& backend, std::vector<std::string_view> names,
                  std::vector<Output> outputs)
      : backend_(backend),
        names_(std::move(names)),
        site_(backend.site(names_)),
        outputs_(std::move(outputs)),
        completion_(site_) {}

  void run(std::unique_ptr<Execution> host) { host_ = std::move(host); }

  [[nodiscard]] std::optional<Route> route() const override { return Route::Staged; }
  Progress advance() override {
    if (done_) return Progress::Done;
    if (!copying_) {
      const Progress progress = host_->advance();
      if (progress != Progress::Done) return progress;
      copy_back();
    }
    const DeviceGuard guard(site_);
    if (!happened(site_, completion_)) return Progress::Idle;
    done_ = true;
    outputs_.clear();
    host_.reset();
    return Progress::Done;
  }
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> copying_out_since()
      const override {
    return since_;
  }

 private:
  void copy_back() {
    const DeviceGuard guard(site_);
    since_ = std::chrono::steady_clock::now();
    for (const Output& output : outputs_) {
      if (output.bytes == 0) continue;
      if (output.ready != nullptr) backend_.stream().wait_for(site_, output.ready);
      check(site_,
            site_.table->memcpy_async(output.to, output.from.get(), output.bytes,
                                      backend_.stream().get()),
            "cudaMemcpyAsync");
    }
    completion_.record(site_, backend_.stream());
    copying_ = true;
  }

  StagedBackend& backend_;
  const std::vector<std::string_view> names_;
  const CallContext site_;
  std::vector<Output> outputs_;
  Event completion_;
  std::unique_ptr<Execution> host_;
  std::optional<std::chrono::steady_clock::time_point> since_;
  bool copying_ = false;
  bool done_ = false;
};

}  // namespace

StagedBackend::StagedBackend(const GpuApi& table, int rank, int device, std::vector<Backend*> host,
                             std::shared_ptr<Arena> arena, int index, WorldFailure failure,
                             std::shared_ptr<void> memory)
    : table_(table),
      rank_(rank),
      device_(device),
      host_(std::move(host)),
      arena_(std::move(arena)),
      pinned_(std::make_shared<PinnedPool>(table, device, arena_, std::move(memory), tell_refused)),
      index_(static_cast<std::size_t>(index)),
      failure_(std::move(failure)),
      guard_(arena_->allocate(1)) {}

StagedBackend::~StagedBackend() { arena_->free(guard_); }

Backend* StagedBackend::host_backend(const BatchTraits& traits) const {
  const BatchTraits wanted = on_host(traits);
  const auto found = std::find_if(host_.begin(), host_.end(), [&](const Backend* backend) {
    return backend->supports(wanted);
  });
  return found == host_.end() ? nullptr : *found;
}

StagedBackend::HostBlock StagedBackend::host_block(std::size_t bytes) const {
  if (std::byte* const block = pinned_->allocate(bytes))
    return {{block, [pool = pinned_](std::byte* taken) { pool->free(taken); }}, true};
  if (std::byte* const block = arena_->try_allocate(bytes))
    return {{block, [arena = arena_](std::byte* taken) { arena->free(taken); }}};
  // the arena is full: the backend for host tensors copies once more
  constexpr std::align_val_t kLine{64};
  return {{static_cast<std::byte*>(::operator new(bytes, kLine)),
           [](std::byte* taken) { ::operator delete(taken, kLine); }}};
}

/// Returns when the stream has done what it was given.
void StagedBackend::pass(const CallContext& site, const Stream& stream) const {
  Event passed(site);
  passed.record(site, stream);
  auto pause = std::chrono::microseconds(0);
  while (!happened(site, passed)) {
    if (failure_.get) failure_.get().raise();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause + std::chrono::microseconds(5), std::chrono::microseconds(200));
  }
}

/// Returns when the tensor is on the host.
void StagedBackend::fetch(const CallContext& site, const BatchMember& member, const HostBlock& to,
                          std::size_t bytes) {
  const DeviceGuard guard(site);
  std::unique_ptr<Stream> stream;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      stream = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (stream == nullptr) {
    stream = std::make_unique<Stream>();
    stream->create(site);
  }
  if (member.ready_event != nullptr) {
    stream->wait_for(site, static_cast<CudaEvent*>(member.ready_event));
    // here, where the wait can be given up: such a copy blocks until its turn has come
    if (!to.pinned) pass(site, *stream);
  }
  check(site, table_.memcpy_async(to.memory.get(), member.input, bytes, stream->get()),
        "cudaMemcpyAsync");
  try {
    pass(site, *stream);
  } catch (...) {
    // the copy may be still to come, and nobody else gets the memory that it will write
    if (!comes_to_rest(table_, device_, *stream, rest_limit)) keep_for_ever(to.memory);
    throw;
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(stream));
}

std::uint64_t StagedBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const std::size_t bytes = bytes_of(traits, member.count);
  const HostBlock block = host_block(bytes);
  Held held{.block = block.memory};
  const bool is_source = traits.kind != OpKind::Broadcast || traits.root == rank_;
  const std::string_view name = member.name;
  try {
    if (is_source && bytes > 0) fetch(site(std::span(&name, 1)), member, block, bytes);
  } catch (const BackendError&) {  // the other ranks would wait for what is never submitted
    if (failure_.set) failure_.set(status_of_current_exception());
    throw;
  }
  BatchMember host = member;
  host.input = held.block.get();
  host.output = is_pulled(traits.kind) ? nullptr : held.block.get();
  host.ready_event = nullptr;
  held.location = host_backend(traits)->prepare(on_host(traits), host);
  member.copied = true;
  const std::lock_guard lock(mutex_);
  const std::uint64_t location = held.location == 0 ? kTicket | ++tickets_ : held.location;
  held_.insert_or_assign(location, std::move(held));
  return location;
}

StagedBackend::Held StagedBackend::take(std::uint64_t location) {
  const std::lock_guard lock(mutex_);
  auto node = held_.extract(location);
  return node.empty() ? Held{} : std::move(node.mapped());
}

void StagedBackend::release(const BatchTraits& traits, std::uint64_t location) noexcept {
  const Held held = take(location);
  if (held.block != nullptr) host_backend(traits)->release(on_host(traits), held.location);
}

bool StagedBackend::abort() noexcept { return comes_to_rest(table_, device_, stream_, rest_limit); }

std::unique_ptr<Execution> StagedBackend::launch(Batch batch) {
  const BatchTraits traits = batch.traits;
  batch.traits = on_host(traits);
  std::vector<std::string_view> names;
  std::vector<StagedExecution::Output> outputs;
  for (BatchMember& member : batch.members) {
    names.push_back(member.name);
    std::uint64_t& mine = member.locations.at(index_);
    Held held = take(mine);
    if (held.block == nullptr)
      fail(site(std::span(&names.back(), 1)), "a staged batch",
           "a tensor was launched that was never prepared");
    mine = held.location;
    const std::size_t bytes = bytes_of(traits, output_count(traits, member));
    auto output = is_pulled(traits.kind) ? host_block(bytes).memory : held.block;
    const bool has_it =
        traits.kind == OpKind::Broadcast && traits.root == rank_ && member.output == member.input;
    outputs.push_back({output, held.block, member.output, has_it ? 0 : bytes,
                       static_cast<CudaEvent*>(member.ready_event)});
    member.input = held.block.get();
    member.output = output.get();
    member.ready_event = nullptr;
  }
  const CallContext here = site(names);
  const DeviceGuard guard(here);
  stream_.create(here);
  auto execution = std::make_unique<StagedExecution>(*this, std::move(names), std::move(outputs));
  execution->run(host_backend(traits)->launch(std::move(batch)));
  return execution;
}

}  // namespace hvd::gpu
