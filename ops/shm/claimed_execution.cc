// Tested in tests/contract/cases/allreduce_cases.cc, tests/hvd/engine/engine_test.cc
#include "ops/shm/executions.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hvd/routes.h"
#include "ops/host_ops.h"
#include "ops/kernels/adasum.h"
#include "ops/kernels/reduce.h"

namespace hvd {

namespace {

// Of what is claimed at once: sizes of the work, no choice of a way.
constexpr std::size_t kMostChunkBytes = 256 << 10;
constexpr std::size_t kLeastChunkBytes = 32 << 10;
constexpr std::size_t kChunksPerRank = 2;

/// A run of one member's elements inside a chunk.
struct Piece {
  std::size_t member, begin, count;
};

/// The batch's elements cut into chunks, or, where tensors are not to be cut, one for each: the
/// same on every rank. There are some for each rank, unless they would become so small that
/// claiming them costs more than it gains, or so large that they leave the cache.
class Chunks {
 public:
  Chunks(const Batch& batch, bool whole_tensors) {
    const std::size_t element = element_bytes(batch.traits.dtype);
    std::int64_t elements = 0;
    for (const auto& member : batch.members) elements += member.count;
    const std::size_t wanted =
        bytes_of(batch.traits, elements) / (kChunksPerRank * batch.ranks.size());
    const std::size_t per_chunk = std::clamp(wanted / kMemberAlignment * kMemberAlignment,
                                             kLeastChunkBytes, kMostChunkBytes) /
                                  element;
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
    // nothing but empty tensors: one empty chunk, so that somebody finishes
    if (first_piece_.empty()) first_piece_.push_back(0);
  }
  [[nodiscard]] std::size_t size() const { return first_piece_.size(); }
  [[nodiscard]] std::span<const Piece> operator[](std::size_t chunk) const {
    const std::size_t end =
        chunk + 1 < first_piece_.size() ? first_piece_[chunk + 1] : pieces_.size();
    return std::span(pieces_).subspan(first_piece_[chunk], end - first_piece_[chunk]);
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_piece_;
};

class ClaimedExecution final : public Execution {
 public:
  ClaimedExecution(ShmContext& context, Batch batch)
      : context_(context),
        batch_(std::move(batch)),
        state_(context.board().batches().state(batch_.sequence)),
        is_adasum_(batch_.traits.op == ReduceOp::Adasum),
        chunks_(batch_, is_adasum_) {
    for (const int rank : batch_.ranks) members_.push_back(context_.topology().index_here(rank));
    reduction_ = reduction_of(batch_.traits);
    by_this_rank_.assign(chunks_.size(), false);
    zeros_count_ = batch_.ranks.size() < batch_.traits.set->ranks.size() &&
                   !zeros_change_nothing(batch_.traits.op);
  }

  Progress advance() override {
    bool worked = false;
    while (!exhausted_) {
      const std::uint64_t chunk = state_.next_chunk.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks_.size()) {
        exhausted_ = true;
        break;
      }
      worked = by_this_rank_[chunk] = true;
      for (const Piece& piece : chunks_[chunk]) work_on(piece);
      if (state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_.size())
        state_.complete.store(true, std::memory_order_release);
    }
    if (!(worked ? context_.linger(state_) : state_.complete.load(std::memory_order_acquire)))
      return worked ? Progress::Advanced : Progress::Idle;
    if (batch_.timed && std::any_of(batch_.members.begin(), batch_.members.end(),
                                    [&](const auto& member) { return is_staged(member); }))
      copying_out_since_ = std::chrono::steady_clock::now();
    copy_out();
    return Progress::Done;
  }
  [[nodiscard]] std::optional<Route> route() const override {
    return is_adasum_ ? Route::Adasum : Route::Claimed;
  }
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> copying_out_since()
      const override {
    return copying_out_since_;
  }

 private:
  [[nodiscard]] std::uint64_t my_location(const BatchMember& member) const {
    return member.locations[static_cast<std::size_t>(context_.staging().self())];
  }
  [[nodiscard]] bool is_staged(const BatchMember& member) const {
    return Staging::is_staged(my_location(member));
  }
  /// Returns whether what this rank reduces of a tensor goes to its own output, not to its block.
  [[nodiscard]] bool goes_straight(const BatchMember& member) const {
    return is_staged(member) && !is_adasum_;
  }
  [[nodiscard]] std::size_t skipped(const Piece& piece) const {
    return piece.begin * element_bytes(batch_.traits.dtype);
  }
  [[nodiscard]] std::byte* output_at(const Piece& piece) const {
    return static_cast<std::byte*>(batch_.members[piece.member].output) + skipped(piece);
  }

  void work_on(const Piece& piece) {
    const auto& member = batch_.members[piece.member];
    const int self = context_.staging().self();
    inputs_.clear();
    outputs_.clear();
    for (const int index : members_) {
      std::byte* const there =
          context_.staging().address(index, member.locations[static_cast<std::size_t>(index)]) +
          skipped(piece);
      inputs_.push_back(there);
      outputs_.push_back(index == self && goes_straight(member) ? output_at(piece) : there);
    }
    if (is_adasum_) return adasum(piece.count);
    if (zeros_count_) {
      zeros_.resize(std::max(zeros_.size(), piece.count * element_bytes(batch_.traits.dtype)));
      inputs_.push_back(zeros_.data());
    }
    kernels::reduce(reduction_, inputs_, outputs_, piece.count);
  }

  /// Brings what has been reduced into this rank's blocks to where it belongs.
  void copy_out() {
    Staging& staging = context_.staging();
    for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      for (const Piece& piece : chunks_[chunk])
        if (const auto& member = batch_.members[piece.member];
            is_staged(member) && piece.count > 0 &&
            !(by_this_rank_[chunk] && goes_straight(member)))
          std::memcpy(output_at(piece),
                      staging.address(staging.self(), my_location(member)) + skipped(piece),
                      bytes_of(batch_.traits, static_cast<std::int64_t>(piece.count)));
    }
    for (const auto& member : batch_.members) staging.release(my_location(member));
  }

  /// Ranks that have joined keep their places among the pairs.
  void adasum(std::size_t count) {
    std::vector<const void*> all;
    std::size_t next = 0;
    for (const int rank : batch_.traits.set->ranks)
      all.push_back(next < batch_.ranks.size() && batch_.ranks[next] == rank ? inputs_[next++]
                                                                             : nullptr);
    kernels::adasum(reduction_, all, outputs_, count);
  }

  ShmContext& context_;
  Batch batch_;
  BatchState& state_;
  const bool is_adasum_;
  Chunks chunks_;
  std::vector<int> members_;        // indices in the domain, in rank order
  std::vector<bool> by_this_rank_;  // chunk by chunk
  kernels::Reduction reduction_;
  bool zeros_count_ = false;  // of the ranks that have joined
  std::vector<std::byte> zeros_;
  bool exhausted_ = false;
  std::optional<std::chrono::steady_clock::time_point> copying_out_since_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace

std::unique_ptr<Execution> make_claimed_execution(ShmContext& context, Batch batch) {
  return std::make_unique<ClaimedExecution>(context, std::move(batch));
}

}  // namespace hvd
