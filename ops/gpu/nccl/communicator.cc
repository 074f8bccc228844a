#include "ops/gpu/nccl/communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "ops/gpu/api/call.h"
#include "ops/gpu/api/handles.h"

namespace hvd::gpu {

using Clock = std::chrono::steady_clock;

/// In the steady state NCCL's thread, which only enqueues then, has long done its part by this
/// time: nothing sleeps. What takes longer waits for other ranks.
constexpr std::chrono::milliseconds kYielding{1};

namespace {

/// NCCL hangs in it when a kernel or the network does.
void abort_within(const GpuApi& table, int device, const Patience& patience,
                  std::vector<NcclComm*> comms) noexcept {
  static_cast<void>(within(patience.abort_limit, [&table, device, comms = std::move(comms)] {
    const DeviceGuard guard(table, device);
    const bool grouped = comms.size() > 1 && table.group_start() == NcclCode::Success;
    for (NcclComm* comm : comms) table.comm_abort(comm);
    if (grouped) table.group_end();
  }));
}

}  // namespace

Communicator::Communicator(const CallContext& site, const Patience& patience, int ranks,
                           const NcclUniqueId& id, int rank, std::string name)
    : table_(site.table),
      device_(site.device),
      patience_(&patience),
      ranks_(ranks),
      name_(std::move(name)) {
  const NcclCode code =
      table_->comm_init_rank(&comm_, ranks, id, rank, !patience.nonblocking, name_.c_str());
  try {
    settle(site, code, "ncclCommInitRankConfig");
  } catch (...) {
    abort();
    throw;
  }
}

void Communicator::settle(const CallContext& site, NcclCode code, std::string_view call) const {
  if (code != NcclCode::InProgress) return check(site, code, call, comm_);
  const auto start = Clock::now(), deadline = start + patience_->limit;
  auto pause = std::chrono::microseconds(50);
  for (;;) {
    NcclCode state = NcclCode::Success;
    check(site, table_->comm_get_async_error(comm_, &state), "ncclCommGetAsyncError", comm_);
    if (state != NcclCode::InProgress) return check(site, state, call, comm_);
    if (patience_->interrupted && patience_->interrupted())
      fail(site, call, "given up, because the world has failed meanwhile");
    if (Clock::now() > deadline) {
      fail(site, call,
           formatted("no answer for {} ms; is a rank missing that should take part?",
                     patience_->limit.count()));
    }
    if (Clock::now() - start < kYielding) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause + std::chrono::microseconds(50), std::chrono::microseconds(1000));
  }
}

void Communicator::check_async(const CallContext& site) const {
  if (comm_ == nullptr) fail(site, "ncclCommGetAsyncError", "the communicator was aborted");
  NcclCode state = NcclCode::Success;
  check(site, table_->comm_get_async_error(comm_, &state), "ncclCommGetAsyncError", comm_);
  if (state != NcclCode::InProgress)
    check(site, state, "an NCCL collective (reported by ncclCommGetAsyncError)", comm_);
}

void Communicator::abort() noexcept {
  if (NcclComm* const comm = release(); comm != nullptr)
    abort_within(*table_, device_, *patience_, {comm});
}

const std::uint32_t* AbortMark::get(const CallContext& site) {
  if (read_ == nullptr && !register_shared()) {
    void* memory = nullptr;
    check(site, table_.host_malloc(&memory, sizeof *own_), "cudaHostAlloc");
    read_ = own_ = static_cast<std::uint32_t*>(memory);
  }
  return read_;
}

bool AbortMark::register_shared() noexcept {
  if (shared_ == nullptr || table_.host_register(shared_, kSharedBytes) != CudaCode::Success)
    return false;
  void* address = nullptr;
  registered_ = table_.host_device_pointer(&address, shared_) == CudaCode::Success;
  if (registered_) {
    read_ = static_cast<const std::uint32_t*>(address);
  } else {
    table_.host_unregister(shared_);
  }
  return registered_;
}

void AbortMark::set() noexcept {
  if (shared_ != nullptr) std::atomic_ref(*shared_).store(1);
  if (own_ != nullptr) std::atomic_ref(*own_).store(1);
}

bool AbortMark::is_set() const noexcept {
  const auto says = [](std::uint32_t* word) {
    return word != nullptr && std::atomic_ref(*word).load() != 0;
  };
  return says(shared_) || says(own_);
}

void AbortMark::close() noexcept {
  std::uint32_t* const own = std::exchange(own_, nullptr);
  const bool registered = std::exchange(registered_, false);
  read_ = nullptr;
  if (own == nullptr && !registered) return;
  const DeviceGuard guard(table_, device_);
  if (registered) table_.host_unregister(shared_);
  if (own != nullptr) table_.host_free(own);
}

Communicators::Communicators(const GpuApi& table, int device, Patience patience,
                             std::uint32_t* abort_word)
    : table_(table),
      device_(device),
      patience_(std::move(patience)),
      mark_(table, device, abort_word) {}

std::shared_ptr<Communicator> Communicators::of(const CallContext& site,
                                                const std::vector<int>& ranks, int rank, int track,
                                                const IdBroadcast& exchange) {
  require_alive(site);
  auto& communicator = by_ranks_[{track, ranks}];
  if (communicator == nullptr) {
    // before any kernel waits for another rank: CUDA may wait for the device
    static_cast<void>(mark_.get(site));
    const NcclUniqueId id = agree_on_id(site, ranks.front(), rank == 0, exchange);
    communicator =
        std::make_shared<Communicator>(site, patience_, static_cast<int>(ranks.size()), id, rank,
                                       formatted("hvd {} stream {}", rank_list(ranks), track));
  }
  return communicator;
}

void Communicators::require_alive(const CallContext& site) const {
  if (failed_ || aborted_)
    fail(site, "an NCCL collective", "the communicators were aborted after an earlier failure");
}

/// The first rank sends the id or, if NCCL gave it none, the reason: the others wait for one or the
/// other.
NcclUniqueId Communicators::agree_on_id(const CallContext& site, int first, bool is_first,
                                        const IdBroadcast& exchange) const {
  NcclUniqueId id;
  Bytes mine;
  if (is_first) {
    const NcclCode code = table_.get_unique_id(&id);
    const std::string words =
        code == NcclCode::Success ? std::string() : table_.nccl_error(code, nullptr);
    mine.resize(1 + (words.empty() ? id.bytes.size() : words.size()));
    mine[0] = std::byte{code == NcclCode::Success};
    std::memcpy(mine.data() + 1, words.empty() ? id.bytes.data() : words.data(), mine.size() - 1);
  }
  const Bytes received = exchange(std::move(mine));
  const char* text = reinterpret_cast<const char*>(received.data()) + 1;
  if (!received.empty() && received[0] == std::byte{0}) {
    fail(site, "ncclGetUniqueId",
         formatted("rank {} says: {}", first, std::string_view(text, received.size() - 1)));
  }
  if (received.size() != 1 + id.bytes.size()) {
    fail(site, "the exchange of NCCL's unique id",
         formatted("{} bytes arrived instead of {}", received.size(), 1 + id.bytes.size()));
  }
  std::memcpy(id.bytes.data(), text, id.bytes.size());
  return id;
}

void Communicators::abort_all() noexcept {
  refuse();
  end();
}

void Communicators::end() noexcept {
  if (std::exchange(aborted_, true)) return;
  if (failed_) mark_.set();
  std::vector<NcclComm*> live;
  for (auto& [ranks, communicator] : by_ranks_)
    if (communicator != nullptr && !communicator->aborted())
      live.push_back(communicator->release());
  if (!live.empty()) abort_within(table_, device_, patience_, std::move(live));
}

}  // namespace hvd::gpu
