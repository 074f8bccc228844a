#include "ops/shm_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "ops/kernels/reduce.h"

namespace hvd {

namespace {

constexpr std::size_t kChunkBytes = 256 << 10;

std::size_t bytes_of(const BatchTraits& traits, std::int64_t count) {
  return static_cast<std::size_t>(count) * element_bytes(traits.dtype);
}

/// A run of one member's elements inside a chunk.
struct Piece {
  std::size_t member, begin, count;
};

/// The batch's elements cut into chunks of about kChunkBytes: the same on every rank.
class Chunks {
 public:
  explicit Chunks(const Batch& batch) {
    const std::size_t element = element_bytes(batch.traits.dtype);
    const std::size_t per_chunk = kChunkBytes / element;
    std::size_t room = 0;
    for (std::size_t member = 0; member < batch.members.size(); ++member) {
      const auto count = static_cast<std::size_t>(batch.members[member].count);
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
      : backend_(backend), batch_(std::move(batch)), state_(backend.board().batch(batch_.sequence)), chunks_(batch_) {
    for (const int rank : batch_.traits.set->ranks) members_.push_back(backend_.domain_index(rank));
    if (batch_.traits.kind == OpKind::Broadcast) root_ = backend_.domain_index(batch_.traits.root);
    const bool average = batch_.traits.op == ReduceOp::Average;
    reduction_ = {batch_.traits.dtype,
                  batch_.traits.op,
                  batch_.traits.prescale_factor,
                  batch_.traits.postscale_factor,
                  average ? static_cast<int>(members_.size()) : 1,
                  batch_.traits.dtype};
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
    for (const auto& member : batch_.members)
      backend_.staging().take_out(member.locations[static_cast<std::size_t>(backend_.staging().self())], member.output,
                                  bytes_of(batch_.traits, member.count));
    return Progress::Done;
  }

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
    kernels::reduce(reduction_, inputs_, outputs_, piece.count);
  }

  ShmBackend& backend_;
  Batch batch_;
  BatchState& state_;
  Chunks chunks_;
  std::vector<int> members_;  // indices in the domain, in rank order
  int root_ = 0;
  kernels::Reduction reduction_;
  bool exhausted_ = false;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

/// Allgather: each rank copies from all others' blocks into its own output.
class GatherExecution final : public Execution {
 public:
  GatherExecution(ShmBackend& backend, Batch batch)
      : backend_(backend), batch_(std::move(batch)), state_(backend.board().batch(batch_.sequence)) {}

  Progress advance() override {
    const auto& ranks = batch_.traits.set->ranks;
    const bool copied_now = !std::exchange(copied_, true);
    if (copied_now) {
      for (const auto& member : batch_.members) {
        auto* to = static_cast<std::byte*>(member.output);
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          const int index = backend_.domain_index(ranks[i]);
          const std::size_t bytes = bytes_of(batch_.traits, member.counts[i]);
          if (bytes > 0) std::memcpy(to, backend_.staging().address(index, member.locations[static_cast<std::size_t>(index)]), bytes);
          to += bytes;
        }
      }
      if (state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks.size())
        state_.complete.store(true, std::memory_order_release);
    }
    // The others read from this rank's blocks until all have copied. A staged block can wait for that without its owner.
    const auto in_place = [&](const BatchMember& member) { return !Staging::is_staged(my_location(member)); };
    const bool complete = state_.complete.load(std::memory_order_acquire);
    if (!complete && std::any_of(batch_.members.begin(), batch_.members.end(), in_place))
      return copied_now ? Progress::Advanced : Progress::Idle;
    for (const auto& member : batch_.members) backend_.staging().release_later(batch_.sequence, my_location(member));
    return Progress::Done;
  }

 private:
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const {
    return member.locations[static_cast<std::size_t>(backend_.staging().self())];
  }
  ShmBackend& backend_;
  Batch batch_;
  BatchState& state_;
  bool copied_ = false;
};

}  // namespace

ShmBackend::ShmBackend(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology,
                       std::shared_ptr<StatsCounters> stats)
    : board_(board),
      topology_(std::move(topology)),
      staging_(std::move(memory), std::move(arena), topology_.domain_index),
      stats_(std::move(stats)) {}

int ShmBackend::domain_index(int rank) const {
  const auto& ranks = topology_.domain_ranks;
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

bool ShmBackend::supports(const BatchTraits& traits) const {
  if (traits.device.kind != DeviceKind::Cpu) return false;
  const auto& ranks = topology_.domain_ranks;
  if (!std::includes(ranks.begin(), ranks.end(), traits.set->ranks.begin(), traits.set->ranks.end())) return false;
  if (traits.kind == OpKind::Allreduce) return kernels::supported(traits.dtype, traits.op);
  return traits.kind == OpKind::Broadcast || traits.kind == OpKind::Allgather;
}

std::uint64_t ShmBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const std::size_t bytes = bytes_of(traits, member.count);
  const bool is_source = traits.kind != OpKind::Broadcast || traits.root == topology_.rank;
  if (traits.kind == OpKind::Allgather) {
    if (const auto place = staging_.find(member.input)) {
      stats_->add(stats_->bytes_zero_copy, bytes);
      return *place;
    }
  } else if (const auto place = staging_.find(member.output)) {
    if (is_source && member.input != member.output && bytes > 0) std::memcpy(member.output, member.input, bytes);
    if (member.input == member.output) stats_->add(stats_->bytes_zero_copy, bytes);
    return *place;
  }
  staging_.release_over([this](std::uint64_t sequence) { return board_.is_over(sequence); });
  return staging_.stage(is_source ? member.input : nullptr, bytes);
}

void ShmBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept { staging_.release(location); }

std::unique_ptr<Execution> ShmBackend::launch(Batch batch) {
  if (batch.traits.kind == OpKind::Allgather) return std::make_unique<GatherExecution>(*this, std::move(batch));
  return std::make_unique<ClaimedExecution>(*this, std::move(batch));
}

}  // namespace hvd
