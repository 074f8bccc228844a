#include "ops/shm/shm_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "ops/host_ops.h"
#include "ops/kernels/adasum.h"
#include "ops/kernels/reduce.h"
#include "ops/shm/pull_execution.h"

namespace hvd {

namespace {

constexpr std::size_t kMostChunkBytes = 256 << 10;
constexpr std::size_t kLeastChunkBytes = 32 << 10;
constexpr std::size_t kChunksPerRank = 2;

/// What several ranks are to read is copied into shared memory up to so many bytes: reading that is faster than reading memory of another
/// process, by more than the copy takes (4 ranks on 2 cores, broadcast of 256 KiB 33 us instead of 56, of 4 MiB 0.8 ms instead of 1.3).
constexpr std::size_t kMostStagedForMany = std::size_t{16} << 20;
constexpr std::size_t kLeastHelped = 2 << 20;  // below it the owner of memory is no help to who reads it
/// Of all that is staged at a time: a whole model is broadcast as one group.
constexpr std::size_t kMostStagedAtOnce = std::size_t{64} << 20;

/// Whether each rank takes what it needs from the others.
constexpr bool pulls(OpKind kind) { return is_pulled(kind) || kind == OpKind::Broadcast; }

/// Gives each block, whose parts are of so many bytes, the part of each other one that is for it.
void exchange(std::span<std::byte* const> blocks, std::size_t part) {
  for (std::size_t i = 0; i < blocks.size(); ++i)
    for (std::size_t j = i + 1; j < blocks.size(); ++j)
      std::swap_ranges(blocks[i] + j * part, blocks[i] + (j + 1) * part, blocks[j] + i * part);
}

/// A run of one member's elements inside a chunk.
struct Piece {
  std::size_t member, begin, count;
};

/// The batch's elements cut into chunks, or, where tensors are not to be cut, one for each: the same on every rank. There are some for each
/// rank, unless they would become so small that claiming them costs more than it gains, or so large that they leave the cache.
class Chunks {
 public:
  Chunks(const Batch& batch, bool whole_tensors) {
    const std::size_t element = element_bytes(batch.traits.dtype);
    std::int64_t elements = 0;
    for (const auto& member : batch.members) elements += member.count;
    const std::size_t wanted = bytes_of(batch.traits, elements) / (kChunksPerRank * batch.ranks.size());
    const std::size_t per_chunk = std::clamp(wanted / kMemberAlignment * kMemberAlignment, kLeastChunkBytes, kMostChunkBytes) / element;
    std::size_t room = 0;
    for (std::size_t member = 0; member < batch.members.size(); ++member) {
      const auto count = static_cast<std::size_t>(batch.members[member].count);
      if (whole_tensors) {
        first_piece_.push_back(pieces_.size());
        pieces_.push_back({member, 0, count});
        continue;
      }
      for (std::size_t begin = 0; begin < count;) {
        if (room == 0) {
          first_piece_.push_back(pieces_.size());
          room = per_chunk;
        }
        const std::size_t take = std::min(room, count - begin);
        pieces_.push_back({member, begin, take});
        begin += take;
        room -= take;
      }
    }
    if (first_piece_.empty()) first_piece_.push_back(0);  // nothing but empty tensors: one empty chunk, so that somebody finishes
  }
  [[nodiscard]] std::size_t size() const { return first_piece_.size(); }
  [[nodiscard]] std::span<const Piece> operator[](std::size_t chunk) const {
    const std::size_t end = chunk + 1 < first_piece_.size() ? first_piece_[chunk + 1] : pieces_.size();
    return std::span(pieces_).subspan(first_piece_[chunk], end - first_piece_[chunk]);
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_piece_;
};

/// Allreduce: chunks are claimed, results are written into every rank's block.
class ClaimedExecution final : public Execution {
 public:
  ClaimedExecution(ShmContext& context, Batch batch)
      : context_(context),
        batch_(std::move(batch)),
        state_(context.board().batch(batch_.sequence)),
        is_adasum_(batch_.traits.op == ReduceOp::Adasum),
        chunks_(batch_, is_adasum_) {
    for (const int rank : batch_.ranks) members_.push_back(context_.domain_index(rank));
    reduction_ = reduction_of(batch_.traits);
    zeros_count_ = batch_.ranks.size() < batch_.traits.set->ranks.size() && !zeros_change_nothing(batch_.traits.op);
  }

  Progress advance() override {
    bool worked = false;
    while (!exhausted_) {
      const std::uint64_t chunk = state_.next_chunk.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks_.size()) {
        exhausted_ = true;
        break;
      }
      worked = true;
      for (const Piece& piece : chunks_[chunk]) work_on(piece);
      if (state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_.size())
        state_.complete.store(true, std::memory_order_release);
    }
    if (!(worked ? context_.linger(state_) : state_.complete.load(std::memory_order_acquire)))
      return worked ? Progress::Advanced : Progress::Idle;
    if (batch_.timed && std::any_of(batch_.members.begin(), batch_.members.end(), [&](const auto& member) {
          return Staging::is_staged(member.locations[static_cast<std::size_t>(context_.staging().self())]);
        }))
      copying_out_since_ = std::chrono::steady_clock::now();
    for (const auto& member : batch_.members)
      context_.staging().take_out(member.locations[static_cast<std::size_t>(context_.staging().self())], member.output,
                                  bytes_of(batch_.traits, member.count));
    return Progress::Done;
  }
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> copying_out_since() const override { return copying_out_since_; }

 private:
  void work_on(const Piece& piece) {
    const auto& member = batch_.members[piece.member];
    const std::size_t element = element_bytes(batch_.traits.dtype);
    const auto at = [&](int index) {
      return context_.staging().address(index, member.locations[static_cast<std::size_t>(index)]) + piece.begin * element;
    };
    inputs_.clear();
    outputs_.clear();
    for (const int index : members_) {
      inputs_.push_back(at(index));
      outputs_.push_back(at(index));
    }
    if (is_adasum_) return adasum(piece.count);
    if (zeros_count_) {
      zeros_.resize(std::max(zeros_.size(), piece.count * element));
      inputs_.push_back(zeros_.data());
    }
    kernels::reduce(reduction_, inputs_, outputs_, piece.count);
  }

  /// Ranks that have joined keep their places among the pairs.
  void adasum(std::size_t count) {
    std::vector<const void*> all;
    std::size_t next = 0;
    for (const int rank : batch_.traits.set->ranks)
      all.push_back(next < batch_.ranks.size() && batch_.ranks[next] == rank ? inputs_[next++] : nullptr);
    kernels::adasum(reduction_, all, outputs_, count);
  }

  ShmContext& context_;
  Batch batch_;
  BatchState& state_;
  const bool is_adasum_;
  Chunks chunks_;
  std::vector<int> members_;  // indices in the domain, in rank order
  kernels::Reduction reduction_;
  bool zeros_count_ = false;  // of the ranks that have joined
  std::vector<std::byte> zeros_;
  bool exhausted_ = false;
  std::optional<std::chrono::steady_clock::time_point> copying_out_since_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace

ShmBackend::ShmBackend(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology,
                       std::shared_ptr<StatsCounters> stats)
    : context_(std::move(memory), std::move(arena), board, std::move(topology)),
      board_(board),
      topology_(context_.topology()),
      staging_(context_.staging()),
      pulled_blocks_(staging_, [this](std::uint64_t sequence) { return board_.is_over(sequence); }),
      stats_(std::move(stats)) {
  gathered_.reserve(static_cast<std::size_t>(kSmallBatchBytes));
  outputs_.reserve(topology_.domain_ranks.size());
  inputs_.reserve(topology_.domain_ranks.size());
}

bool ShmBackend::supports(const BatchTraits& traits) const {
  if (traits.device.kind != DeviceKind::Cpu) return false;
  const auto& ranks = topology_.domain_ranks;
  if (!std::includes(ranks.begin(), ranks.end(), traits.set->ranks.begin(), traits.set->ranks.end())) return false;
  return host_supports(traits);
}

std::uint64_t ShmBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const std::size_t bytes = bytes_of(traits, member.count);
  const bool small = static_cast<std::int64_t>(bytes) <= kSmallBatchBytes;
  const bool is_source = traits.kind != OpKind::Broadcast || traits.root == topology_.rank;
  if (pulls(traits.kind)) {
    if (!is_source) return staging_.nowhere();
    // What is small is copied even out of the arena, so that this rank need not wait until the others have read it.
    if (const auto place = small ? std::nullopt : staging_.find(member.input)) {
      stats_->add(stats_->bytes_zero_copy, bytes);
      return *place;
    }
  } else if (const auto place = staging_.find(member.output)) {
    member.copied = member.input != member.output && bytes > 0;
    if (member.copied) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats_->add(stats_->bytes_zero_copy, bytes);
    return *place;
  }
  staging_.release_over([this](std::uint64_t sequence) { return board_.is_over(sequence); });
  const bool for_many = traits.kind == OpKind::Broadcast && traits.set->ranks.size() > 2 && bytes <= kMostStagedForMany &&
                        staging_.staged_bytes() + bytes <= kMostStagedAtOnce;
  if (pulls(traits.kind) && !small && !for_many)
    if (const auto place =
            staging_.show(member.input, bytes,
                          traits.kind == OpKind::Broadcast && bytes >= kLeastHelped && context_.can_help(traits.set->ranks.size()) &&
                              staging_.staged_bytes() + sizeof(Relay) <= kMostStagedAtOnce))
      return *place;
  member.copied = bytes > 0;
  return staging_.stage(member.input, bytes);
}

bool ShmBackend::any_rank_finishes(const BatchTraits& /*traits*/, std::int64_t /*bytes*/) const {
  return true;  // where a rank needs the others after all, its execution rings for them
}

void ShmBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept {
  if (!board_.failed())
    staging_.release(location);  // after a failure another rank may be at work there still; the world's memory goes as a whole
}

std::optional<std::uint64_t> ShmBackend::keep(const BatchTraits& traits, std::size_t bytes) {
  if (traits.kind == OpKind::Allreduce && traits.op == ReduceOp::Adasum) return std::nullopt;
  return staging_.keep(bytes);
}
void ShmBackend::drop(std::uint64_t location) noexcept { staging_.drop(location); }
bool ShmBackend::is_free(std::uint64_t location) {
  return staging_.is_free(location, [this](std::uint64_t sequence) { return board_.is_over(sequence); });
}
std::byte* ShmBackend::kept(int index, std::uint64_t location) {
  return Staging::is_kept(location) ? staging_.address(index, location) : nullptr;
}

void ShmBackend::run_for_all(const BatchTraits& traits, std::int64_t count, std::span<std::byte* const> blocks,
                             std::span<const std::int64_t> parts) {
  const std::size_t bytes = bytes_of(traits, count);
  if (count == 0) return;
  if (traits.kind == OpKind::Broadcast) {
    const auto& ranks = traits.set->ranks;
    const auto* const source = blocks[static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), traits.root) - ranks.begin())];
    for (std::byte* block : blocks)
      if (block != source) std::memcpy(block, source, bytes);
  } else if (traits.kind == OpKind::Alltoall && std::all_of(parts.begin(), parts.end(), [&](auto part) { return part == parts[0]; })) {
    exchange(blocks, bytes_of(traits, parts[0]));
  } else if (traits.kind == OpKind::Allgather || traits.kind == OpKind::Alltoall) {
    gathered_.resize(bytes * blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) std::memcpy(gathered_.data() + i * bytes, blocks[i], bytes);
    if (traits.kind == OpKind::Allgather) {
      for (std::byte* block : blocks) std::memcpy(block, gathered_.data(), gathered_.size());
      return;
    }
    const std::byte* from = gathered_.data();
    for (std::size_t to = 0; to < blocks.size(); ++to) {
      const std::size_t part = bytes_of(traits, parts[to]);
      for (std::size_t i = 0; part > 0 && i < blocks.size(); ++i) std::memcpy(blocks[to] + i * part, from + i * bytes, part);
      from += part;
    }
  } else {
    inputs_.assign(blocks.begin(), blocks.end());
    outputs_.assign(blocks.begin(), blocks.end());
    kernels::reduce(reduction_of(traits), inputs_, outputs_, static_cast<std::size_t>(count));
  }
}

std::optional<std::uint64_t> ShmBackend::lend(std::size_t bytes) {
  return bytes == 0 ? Staging::own_location(0) : pulled_blocks_.lend(bytes);
}
bool ShmBackend::is_lent(std::uint64_t location) { return Staging::is_kept(location); }
void ShmBackend::take_back(std::uint64_t location, std::uint32_t readers) noexcept {
  if (!Staging::is_own(location)) pulled_blocks_.take_back(location, readers);
}
void ShmBackend::pull(const BatchTraits& traits, std::int64_t count, std::span<const std::byte* const> blocks,
                      std::span<const std::int64_t> parts, void* output) {
  PulledBlocks::pull(traits, count, blocks, parts, output);
}
void ShmBackend::finish_reading(std::span<const std::byte* const> blocks) noexcept { PulledBlocks::finish_reading(blocks); }

std::unique_ptr<Execution> ShmBackend::launch(Batch batch) {
  if (pulls(batch.traits.kind)) return std::make_unique<PullExecution>(context_, std::move(batch));
  return std::make_unique<ClaimedExecution>(context_, std::move(batch));
}

}  // namespace hvd
