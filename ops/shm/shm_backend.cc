#include "ops/shm/shm_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "ops/kernels/reduce.h"
#include "ops/shm/executions.h"

namespace hvd {

namespace {

/// Gives each block, whose parts are of so many bytes, the part of each other one that is for it.
void exchange(std::span<std::byte* const> blocks, std::size_t part) {
  for (std::size_t i = 0; i < blocks.size(); ++i)
    for (std::size_t j = i + 1; j < blocks.size(); ++j)
      std::swap_ranges(blocks[i] + j * part, blocks[i] + (j + 1) * part, blocks[j] + i * part);
}

}  // namespace

std::shared_ptr<Arena> make_arena(const DomainMemory& memory, int index) {
  // A view of its own: users' memory outlives the engine and its board.
  return std::make_shared<Arena>(
      memory.arenas[static_cast<std::size_t>(index)],
      [board = std::make_shared<Board>(memory.board, index)] { return board->failed(); });
}

ShmBackend::ShmBackend(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board,
                       Topology topology, std::shared_ptr<StatsCounters> stats)
    : machine_{.reads_others = memory.direct_copies,
               .is_slow = memory.slow_copies,
               .has_core = topology.has_core(),
               .gpu = {}},
      context_(std::move(memory), std::move(arena), board, std::move(topology)),
      board_(board),
      topology_(context_.topology()),
      staging_(context_.staging()),
      pulled_blocks_(staging_,
                     [this](std::uint64_t sequence) { return board_.batches().is_over(sequence); }),
      stats_(std::move(stats)) {
  gathered_.reserve(limit(Limit::AtOnceBytes));
  outputs_.reserve(topology_.domain_ranks.size());
  inputs_.reserve(topology_.domain_ranks.size());
}

bool ShmBackend::supports(const BatchTraits& traits) const {
  if (traits.device.kind != DeviceKind::Cpu) return false;
  const auto& ranks = topology_.domain_ranks;
  if (!std::includes(ranks.begin(), ranks.end(), traits.set->ranks.begin(),
                     traits.set->ranks.end()))
    return false;
  return host_supports(traits);
}

std::uint64_t ShmBackend::prepare(const BatchTraits& traits, BatchMember& member) {
  const std::size_t bytes = bytes_of(traits, member.count);
  const bool small = routes::is_at_once(bytes);
  const bool is_source = traits.kind != OpKind::Broadcast || traits.root == topology_.rank;
  if (routes::takes(traits.kind)) {
    if (!is_source) return staging_.nowhere();
    // What is small is copied even out of the arena, so that this rank need not wait until the
    // others have read it.
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
  staging_.release_over(
      [this](std::uint64_t sequence) { return board_.batches().is_over(sequence); });
  const std::size_t ranks = traits.set->ranks.size();
  if (routes::takes(traits.kind) && !small &&
      !routes::is_copied(traits.kind, bytes, ranks, machine_.is_slow, staging_.staged_bytes()))
    if (const auto place = staging_.show(
            member.input, bytes, routes::relays(traits.kind, bytes, ranks, machine_), ranks - 1))
      return *place;
  member.copied = bytes > 0;
  return staging_.stage(member.input, bytes);
}

void ShmBackend::release(const BatchTraits& /*traits*/, std::uint64_t location) noexcept {
  staging_.release(location);
}

std::optional<std::uint64_t> ShmBackend::keep(const BatchTraits& traits, std::size_t bytes) {
  if (traits.kind == OpKind::Allreduce && traits.op == ReduceOp::Adasum) return std::nullopt;
  return staging_.keep(bytes);
}
void ShmBackend::drop(std::uint64_t location) noexcept { staging_.drop(location); }
bool ShmBackend::is_free(std::uint64_t location) {
  return staging_.is_free(
      location, [this](std::uint64_t sequence) { return board_.batches().is_over(sequence); });
}
std::byte* ShmBackend::kept(int index, std::uint64_t location) {
  return Staging::is_kept(location) ? staging_.address(index, location) : nullptr;
}

void ShmBackend::run_for_all(const BatchTraits& traits, std::int64_t count,
                             std::span<std::byte* const> blocks,
                             std::span<const std::int64_t> parts) {
  const std::size_t bytes = bytes_of(traits, count);
  if (count == 0) return;
  if (traits.kind == OpKind::Broadcast) {
    const auto& ranks = traits.set->ranks;
    const auto* const source = blocks[static_cast<std::size_t>(
        std::lower_bound(ranks.begin(), ranks.end(), traits.root) - ranks.begin())];
    for (std::byte* block : blocks)
      if (block != source) std::memcpy(block, source, bytes);
  } else if (traits.kind == OpKind::Alltoall &&
             std::all_of(parts.begin(), parts.end(), [&](auto part) { return part == parts[0]; })) {
    exchange(blocks, bytes_of(traits, parts[0]));
  } else if (traits.kind == OpKind::Allgather || traits.kind == OpKind::Alltoall) {
    gathered_.resize(bytes * blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i)
      std::memcpy(gathered_.data() + i * bytes, blocks[i], bytes);
    if (traits.kind == OpKind::Allgather) {
      for (std::byte* block : blocks) std::memcpy(block, gathered_.data(), gathered_.size());
      return;
    }
    const std::byte* from = gathered_.data();
    for (std::size_t to = 0; to < blocks.size(); ++to) {
      const std::size_t part = bytes_of(traits, parts[to]);
      for (std::size_t i = 0; part > 0 && i < blocks.size(); ++i)
        std::memcpy(blocks[to] + i * part, from + i * bytes, part);
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
void ShmBackend::pull(const BatchTraits& traits, std::int64_t count,
                      std::span<const std::byte* const> blocks, std::span<const std::int64_t> parts,
                      void* output) {
  PulledBlocks::pull(traits, count, blocks, parts, output);
}
void ShmBackend::finish_reading(std::span<const std::byte* const> blocks) noexcept {
  PulledBlocks::finish_reading(blocks);
}

std::optional<std::uint64_t> ShmBackend::expose(const void* memory, std::size_t bytes, bool fed) {
  if (const auto place = staging_.find(memory)) return place;
  return routes::is_exposed(machine_) && !fed ? staging_.show(memory, bytes) : std::nullopt;
}

std::unique_ptr<Execution> ShmBackend::launch(Batch batch) {
  if (routes::takes(batch.traits.kind))
    return std::make_unique<PullExecution>(context_, std::move(batch));
  return make_claimed_execution(context_, std::move(batch));
}

}  // namespace hvd
