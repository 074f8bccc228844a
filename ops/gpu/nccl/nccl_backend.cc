#include "ops/gpu/nccl/nccl_backend.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/engine/progress/batch_runner.h"
#include "hvd/errors.h"
#include "hvd/routes.h"
#include "ops/gpu/api/gpu_execution.h"
#include "ops/gpu/nccl/collectives.h"
#include "ops/gpu/nccl/reduction_plan.h"
#include "ops/host_ops.h"

namespace hvd::gpu {

namespace {

/// Returns where the batch writes. A root's tensor that is its own result is only read.
std::vector<PoisonItem> outputs_of(const Batch& batch) {
  const BatchTraits& traits = batch.traits;
  const ProcessSetInfo& set = *traits.set;
  const bool is_root = traits.kind == OpKind::Broadcast &&
                       traits.root == set.ranks.at(static_cast<std::size_t>(set.rank));
  std::vector<PoisonItem> outputs;
  for (const BatchMember& member : batch.members) {
    if (is_root && member.output == member.input) continue;
    if (const std::size_t bytes = bytes_of(traits, output_count(traits, member)); bytes != 0)
      outputs.push_back({member.output, bytes});
  }
  return outputs;
}

class NcclExecution : public Execution {
 public:
  NcclExecution(const CallContext& site, std::vector<std::string_view> names, Batch batch)
      : batch_(std::move(batch)), names_(std::move(names)), site_(site), completion_(site) {
    site_.tensors = names_;
  }

  const Batch& batch() const { return batch_; }
  const CallContext& site() const { return site_; }

  /// Records the completion event, after the last of the batch was enqueued.
  void launched(const LaunchContext& context, std::shared_ptr<Communicators> all) {
    all_ = std::move(all);
    communicators_ = context.communicators();
    if (!communicators_.empty()) distrust_results(context);
    completion_.record(site_, context.stream);
  }

  [[nodiscard]] std::optional<Route> route() const override { return Route::Nccl; }
  Progress advance() override {
    if (done_) return Progress::Done;
    try {
      const DeviceGuard guard(site_);
      for (const auto& communicator : communicators_) communicator->check_async(site_);
      if (!happened(site_, completion_)) return Progress::Idle;
      if (!communicators_.empty() && all_->mark().is_set())
        fail(site_, "an NCCL collective",
             "another rank has aborted its communicators, and may have left this one's half done");
    } catch (...) {
      all_->refuse();
      throw;
    }
    done_ = true;
    return Progress::Done;
  }

  void* completion_event() override { return completion_.get(); }
  [[nodiscard]] bool is_enqueued() const override { return true; }  // by `launched`

 private:
  /// Last of all: after an abort the outputs are NaN, for whoever's stream goes on when it has
  /// happened.
  void distrust_results(const LaunchContext& context) const {
    const std::vector<PoisonItem> outputs = outputs_of(batch_);
    if (outputs.empty()) return;
    const PoisonJob job{
        .items = outputs, .mark = all_->mark().get(site_), .dtype = batch_.traits.dtype};
    check(site_, site_.table->poison(job, context.stream.get()), "launch_poison");
  }

  const Batch batch_;
  const std::vector<std::string_view> names_;
  CallContext site_;
  Event completion_;
  std::shared_ptr<Communicators> all_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  bool done_ = false;
};

int global_rank(const ProcessSetInfo& set) {
  return set.ranks.at(static_cast<std::size_t>(set.rank));
}

/// The ranks of the set that take part: those that have not joined.
ProcessSetInfo those_present(const Batch& batch) {
  const ProcessSetInfo& set = *batch.traits.set;
  if (batch.ranks.empty() || batch.ranks.size() == set.ranks.size()) return set;
  const auto place = std::lower_bound(batch.ranks.begin(), batch.ranks.end(), global_rank(set));
  return {set.id, batch.ranks, static_cast<int>(place - batch.ranks.begin())};
}

/// The ranks on the host of `ranks[self]`, and those of the same place on every host; none if that
/// makes no two levels.
std::optional<std::pair<std::vector<int>, std::vector<int>>> levels_of(
    const std::vector<int>& ranks, int self, const std::vector<int>& host_of_rank) {
  if (host_of_rank.empty()) return std::nullopt;
  std::map<int, std::vector<int>> by_host;
  const auto host_of = [&](int rank) { return host_of_rank.at(static_cast<std::size_t>(rank)); };
  for (const int rank : ranks) by_host[host_of(rank)].push_back(rank);
  const int rank = ranks.at(static_cast<std::size_t>(self));
  const auto& here = by_host.at(host_of(rank));
  const auto as_many = [&](const auto& host) { return host.second.size() == here.size(); };
  if (by_host.size() < 2 || here.size() < 2 ||
      !std::all_of(by_host.begin(), by_host.end(), as_many))
    return std::nullopt;
  const auto place =
      static_cast<std::size_t>(std::find(here.begin(), here.end(), rank) - here.begin());
  std::vector<int> across;
  for (const auto& [host, theirs] : by_host) across.push_back(theirs[place]);
  std::sort(across.begin(), across.end());
  return std::pair(here, across);
}

/// The root's rank in the set.
int local_root(const BatchTraits& traits) {
  const auto& ranks = traits.set->ranks;
  const auto found = std::find(ranks.begin(), ranks.end(), traits.root);
  if (found == ranks.end())
    throw InvalidArgument(
        formatted("broadcast: root rank {} is not in the process set", traits.root));
  return static_cast<int>(found - ranks.begin());
}

/// For profilers: "hvd allreduce 'layer0' and 7 more".
std::string text_of(const Batch& batch) {
  if (batch.members.empty()) return formatted("hvd {}", name_of(batch.traits.kind));
  const std::string more = batch.members.size() > 1
                               ? formatted(" and {} more", batch.members.size() - 1)
                               : std::string();
  return formatted("hvd {} '{}'{}", name_of(batch.traits.kind), batch.members.front().name, more);
}

}  // namespace

std::function<bool()> world_has_failed(Board& board) {
  using std::chrono::milliseconds, std::chrono::steady_clock;
  return [&board, next = steady_clock::time_point()]() mutable {
    if (board.failed()) return true;
    if (steady_clock::now() < next) return false;
    next = steady_clock::now() + milliseconds(100);
    return board.end_if_one_died();
  };
}

NcclBackend::NcclBackend(const GpuApi& table, int device, UniqueIdExchange exchange,
                         NcclOptions options)
    : table_(table),
      device_(device),
      exchange_(std::move(exchange)),
      options_(std::move(options)),
      communicators_(
          std::make_shared<Communicators>(table, device, options_.patience, options_.abort_word)),
      lent_(std::make_shared<LentMemory>(table, device)) {
  for (int track = 0; track < std::max(options_.streams, 1); ++track)
    tracks_.push_back(std::make_unique<Track>());
}

NcclBackend::~NcclBackend() {
  const bool rested = communicators_->failed() || comes_to_rest();
  // so that what the device has not done yet is trusted by nobody
  if (!rested) communicators_->refuse();
  if (options_.registration == Registration::Window && !communicators_->failed()) {
    const DeviceGuard guard(table_, device_);
    // while there are communicators to tell
    for (const auto& track : tracks_) track->fusion.clear();
  }
  communicators_->end();
  const bool rests = rested && comes_to_rest();
  if (rests) {
    lent_->close();
    communicators_->mark().close();
  }
  const auto is_used = [](const auto& track) { return track->stream.get() != nullptr; };
  // a process without GPU tensors never touches its GPU
  if (std::none_of(tracks_.begin(), tracks_.end(), is_used)) return;
  const DeviceGuard guard(table_, device_);
  if (!rests)  // the device may still write there
    for (const auto& track : tracks_)
      keep_for_ever(std::make_shared<decltype(track->fusion)>(std::move(track->fusion)));
  tracks_.clear();
}

bool NcclBackend::abort() noexcept {
  communicators_->abort_all();
  return comes_to_rest();
}

bool NcclBackend::supports(const BatchTraits& traits) const {
  return traits.device.kind == DeviceKind::Cuda &&
         (!options_.takes || options_.takes(*traits.set)) &&
         moves_or_reduces(traits, reduce_supported);
}

std::shared_ptr<void> NcclBackend::allocate(const BatchTraits& traits, std::size_t bytes) {
  const bool gains = options_.registration == Registration::None && traits.set->ranks.size() > 1 &&
                     traits.device.index == device_;
  return gains ? lent_->lend(bytes) : nullptr;
}

std::unique_ptr<Execution> NcclBackend::launch(Batch batch) {
  auto names = names_of(batch);
  const CallContext site{.table = &table_,
                         .rank = global_rank(*batch.traits.set),
                         .device = device_,
                         .tensors = names};
  communicators_->require_alive(site);  // a rank alone asks for none
  try {
    const DeviceGuard guard(site);
    const Range range(table_, text_of(batch));
    auto execution = std::make_unique<NcclExecution>(site, names, std::move(batch));
    const LaunchContext context = launch_context_of(execution->site(), execution->batch());
    enqueue(context, execution->batch());
    execution->launched(context, communicators_);
    return execution;
  } catch (...) {
    communicators_->refuse();
    throw;
  }
}

/// The batch's track, with the communicators that it needs.
LaunchContext NcclBackend::launch_context_of(const CallContext& site, const Batch& batch) {
  const auto number = static_cast<std::size_t>(batch.order % tracks_.size());
  Track& track = *tracks_[number];
  track.stream.create(site);
  const ProcessSetInfo present = those_present(batch);
  const int self = present.ranks.at(static_cast<std::size_t>(present.rank));
  const auto connect = [&](const std::vector<int>& ranks) {
    const int rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), self) - ranks.begin());
    const auto exchange = [&](Bytes mine) {
      return exchange_({present.id, ranks, rank}, std::move(mine));
    };
    return CommGroup{communicators_->of(site, ranks, rank, static_cast<int>(number), exchange),
                     static_cast<int>(ranks.size()), rank};
  };
  const bool in_windows = options_.registration == Registration::Window;
  FusionBuffer& fusion =
      track.fusion
          .try_emplace(in_windows ? present.ranks : std::vector<int>(),
                       options_.fusion_threshold_bytes, options_.registration, options_.remark)
          .first->second;
  LaunchContext context{{nullptr, static_cast<int>(present.ranks.size()), present.rank},
                        site,
                        track.stream,
                        fusion,
                        *lent_,
                        tracks_.size() > 1 ? &order_ : nullptr,
                        options_.sums_only || in_windows,
                        std::nullopt};
  const bool sums = batch.traits.kind == OpKind::Allreduce;
  if (sums && batch.traits.set->ranks.size() == 1) return context;
  if (const auto levels =
          sums ? levels_of(present.ranks, present.rank, options_.host_of_rank) : std::nullopt) {
    context.levels = {connect(levels->first), connect(levels->second)};
  } else {
    static_cast<CommGroup&>(context) = connect(present.ranks);
  }
  return context;
}

void NcclBackend::enqueue(const LaunchContext& context, const Batch& batch) {
  wait_for_inputs(context.site, context.stream, batch);
  std::vector<Piece> pieces;
  for (const BatchMember& member : batch.members)
    pieces.push_back(
        {member.input, member.output, member.count, member.padded, member.counts, member.sends});
  const BatchTraits& traits = batch.traits;
  const auto joined = static_cast<int>(traits.set->ranks.size()) - context.ranks;
  const Reduction reduction{traits.dtype, traits.op, traits.prescale_factor,
                            traits.postscale_factor, joined};
  switch (traits.kind) {
    case OpKind::Allreduce: return enqueue_allreduce(context, reduction, pieces);
    case OpKind::Reducescatter: return enqueue_reducescatter(context, reduction, pieces);
    case OpKind::Alltoall: return enqueue_alltoall(context, traits.dtype, pieces);
    case OpKind::Broadcast:
      return enqueue_broadcast(context, traits.dtype, local_root(traits), pieces);
    case OpKind::Allgather: return enqueue_allgather(context, traits.dtype, pieces);
    default:
      throw InvalidArgument(
          formatted("NCCL backend: {} is not supported", name_of(batch.traits.kind)));
  }
}

/// Waits for what the streams still do, all of them for a limited time; whether it has ended. What
/// was waited for in vain is looked at once more, and shortly.
bool NcclBackend::comes_to_rest() noexcept {
  using std::chrono::milliseconds, std::chrono::steady_clock;
  const auto limit =
      is_stuck_ ? std::min(options_.rest_limit, milliseconds(20)) : options_.rest_limit;
  const auto deadline = steady_clock::now() + limit;
  is_stuck_ = false;
  for (const auto& track : tracks_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    is_stuck_ = is_stuck_ || !gpu::comes_to_rest(table_, device_, track->stream, left);
  }
  return !is_stuck_;
}

}  // namespace hvd::gpu
