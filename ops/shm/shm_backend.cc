#include "ops/shm/shm_backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "hvd/errors.h"
#include "ops/host_ops.h"
#include "ops/kernels/adasum.h"
#include "ops/kernels/reduce.h"

namespace hvd {

namespace {

constexpr std::size_t kChunkBytes = 256 << 10;

/// A run of one member's elements inside a chunk.
struct Piece {
  std::size_t member, begin, count;
};

/// The batch's elements cut into chunks of about kChunkBytes, or, where tensors are not to be cut, one for each: the same on every rank.
class Chunks {
 public:
  Chunks(const Batch& batch, bool whole_tensors) {
    const std::size_t element = element_bytes(batch.traits.dtype);
    const std::size_t per_chunk = kChunkBytes / element;
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

/// Allreduce and broadcast: chunks are claimed, results are written into every rank's block.
class ClaimedExecution final : public Execution {
 public:
  ClaimedExecution(ShmBackend& backend, Batch batch)
      : backend_(backend),
        batch_(std::move(batch)),
        state_(backend.board().batch(batch_.sequence)),
        is_adasum_(batch_.traits.kind == OpKind::Allreduce && batch_.traits.op == ReduceOp::Adasum),
        chunks_(batch_, is_adasum_) {
    for (const int rank : batch_.ranks) members_.push_back(backend_.domain_index(rank));
    if (batch_.traits.kind == OpKind::Broadcast) root_ = backend_.domain_index(batch_.traits.root);
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
    if (!state_.complete.load(std::memory_order_acquire)) return worked ? Progress::Advanced : Progress::Idle;
    if (batch_.timed && std::any_of(batch_.members.begin(), batch_.members.end(), [&](const auto& member) {
          return Staging::is_staged(member.locations[static_cast<std::size_t>(backend_.staging().self())]);
        }))
      copying_out_since_ = std::chrono::steady_clock::now();
    for (const auto& member : batch_.members)
      backend_.staging().take_out(member.locations[static_cast<std::size_t>(backend_.staging().self())], member.output,
                                  bytes_of(batch_.traits, member.count));
    return Progress::Done;
  }
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> copying_out_since() const override { return copying_out_since_; }

 private:
  void work_on(const Piece& piece) {
    const auto& member = batch_.members[piece.member];
    const std::size_t element = element_bytes(batch_.traits.dtype);
    const auto at = [&](int index) {
      return backend_.staging().address(index, member.locations[static_cast<std::size_t>(index)]) + piece.begin * element;
    };
    if (batch_.traits.kind == OpKind::Broadcast) {
      for (const int index : members_)
        if (index != root_) std::memcpy(at(index), at(root_), piece.count * element);
      return;
    }
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

  ShmBackend& backend_;
  Batch batch_;
  BatchState& state_;
  const bool is_adasum_;
  Chunks chunks_;
  std::vector<int> members_;  // indices in the domain, in rank order
  int root_ = 0;
  kernels::Reduction reduction_;
  bool zeros_count_ = false;  // of the ranks that have joined
  std::vector<std::byte> zeros_;
  bool exhausted_ = false;
  std::optional<std::chrono::steady_clock::time_point> copying_out_since_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

/// Allgather, alltoall, reducescatter: each rank takes from all ranks' blocks what belongs into its own output.
class PullExecution final : public Execution {
 public:
  PullExecution(ShmBackend& backend, Batch batch)
      : backend_(backend), batch_(std::move(batch)), state_(backend.board().batch(batch_.sequence)) {}

  Progress advance() override {
    const bool pulled_now = !std::exchange(pulled_, true);
    if (pulled_now) {
      for (const auto& member : batch_.members) batch_.traits.kind == OpKind::Reducescatter ? reduce(member) : copy(member);
      if (state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == batch_.ranks.size()) {
        state_.complete.store(true, std::memory_order_release);
        backend_.board().ring_waiters();  // ranks that wait with memory of their own in use
      }
    }
    // The others read from this rank's blocks until all have what they want. A staged block can wait for that without its owner.
    const auto in_place = [&](const BatchMember& member) { return !Staging::is_staged(my_location(member)); };
    const bool complete = state_.complete.load(std::memory_order_acquire);
    if (!complete && std::any_of(batch_.members.begin(), batch_.members.end(), in_place))
      return pulled_now ? Progress::Advanced : Progress::Idle;
    for (const auto& member : batch_.members) backend_.staging().release_later(batch_.sequence, my_location(member));
    return Progress::Done;
  }

 private:
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const {
    return member.locations[static_cast<std::size_t>(backend_.staging().self())];
  }
  [[nodiscard]] const std::byte* input_of(const BatchMember& member, std::size_t place) const {
    const int index = backend_.domain_index(batch_.ranks[place]);
    return backend_.staging().address(index, member.locations[static_cast<std::size_t>(index)]);
  }

  void copy(const BatchMember& member) {
    auto* to = static_cast<std::byte*>(member.output);
    for (std::size_t place = 0; place < batch_.ranks.size(); ++place) {
      const std::size_t bytes = bytes_of(batch_.traits, member.counts[place]);
      const std::size_t skipped = member.offsets.empty() ? 0 : bytes_of(batch_.traits, member.offsets[place]);
      if (bytes > 0) std::memcpy(to, input_of(member, place) + skipped, bytes);
      to += bytes;
    }
  }

  void reduce(const BatchMember& member) {
    const auto place = static_cast<std::size_t>(batch_.traits.set->rank);
    const auto own = member.counts.begin() + static_cast<std::ptrdiff_t>(place);
    const std::size_t skipped = bytes_of(batch_.traits, std::accumulate(member.counts.begin(), own, std::int64_t{0}));
    std::vector<const void*> inputs;
    for (std::size_t other = 0; other < batch_.ranks.size(); ++other) inputs.push_back(input_of(member, other) + skipped);
    const std::array<void*, 1> output{member.output};
    if (*own > 0) kernels::reduce(reduction_of(batch_.traits), inputs, output, static_cast<std::size_t>(*own));
  }

  ShmBackend& backend_;
  Batch batch_;
  BatchState& state_;
  bool pulled_ = false;
};

}  // namespace

ShmBackend::ShmBackend(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology,
                       std::shared_ptr<StatsCounters> stats)
    : board_(board),
      topology_(std::move(topology)),
      staging_(std::move(memory), std::move(arena), topology_.domain_index),
      stats_(std::move(stats)) {
  gathered_.reserve(static_cast<std::size_t>(kSmallBatchBytes));
  outputs_.reserve(topology_.domain_ranks.size());
  inputs_.reserve(topology_.domain_ranks.size());
}

int ShmBackend::domain_index(int rank) const {
  const auto& ranks = topology_.domain_ranks;
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

bool ShmBackend::supports(const BatchTraits& traits) const {
  if (traits.device.kind != DeviceKind::Cpu) return false;
  const auto& ranks = topology_.domain_ranks;
  if (!std::includes(ranks.begin(), ranks.end(), traits.set->ranks.begin(), traits.set->ranks.end())) return false;
  return host_supports(traits);
}

std::uint64_t ShmBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const std::size_t bytes = bytes_of(traits, member.count);
  const bool is_source = traits.kind != OpKind::Broadcast || traits.root == topology_.rank;
  if (is_pulled(traits.kind)) {
    // What is small is copied even out of the arena, so that this rank need not wait until the others have read it.
    const auto place = static_cast<std::int64_t>(bytes) > kSmallBatchBytes ? staging_.find(member.input) : std::nullopt;
    if (place) {
      stats_->add(stats_->bytes_zero_copy, bytes);
      return *place;
    }
  } else if (const auto place = staging_.find(member.output)) {
    member.copied = is_source && member.input != member.output && bytes > 0;
    if (member.copied) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats_->add(stats_->bytes_zero_copy, bytes);
    return *place;
  }
  staging_.release_over([this](std::uint64_t sequence) { return board_.is_over(sequence); });
  member.copied = is_source && bytes > 0;
  return staging_.stage(is_source ? member.input : nullptr, bytes);
}

bool ShmBackend::any_rank_finishes(const BatchTraits& traits, std::int64_t bytes) const {
  return !is_pulled(traits.kind) || bytes <= kSmallBatchBytes;
}

void ShmBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept { staging_.release(location); }

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

std::unique_ptr<Execution> ShmBackend::launch(Batch batch) {
  if (is_pulled(batch.traits.kind)) return std::make_unique<PullExecution>(*this, std::move(batch));
  return std::make_unique<ClaimedExecution>(*this, std::move(batch));
}

}  // namespace hvd
